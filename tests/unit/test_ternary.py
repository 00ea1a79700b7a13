"""Ternary words under one bit: every word, the choice of places and scales, GPTQ, and compressed mixtures."""

import json
from itertools import combinations

import pytest
import torch

from colonnade import api
from colonnade.checkpoint.digest import digest_of
from colonnade.cli import main
from colonnade.compress import Compression, compress
from colonnade.compress.gptq import damped, error, gptq, nearest
from colonnade.compress.recover import recover
from colonnade.compress.ternary_training import round_trits
from colonnade.config import ModelConfig, MoeConfig, ServeConfig
from colonnade.config.feature_checks import check_quantised
from colonnade.errors import CheckpointError, ConfigError, PlanError
from colonnade.kernels.linear import cuda_ternary, ternary
from colonnade.kernels.linear.quantise import dequantise, quantise, stored_bytes
from colonnade.model.weight_only_quant import StoredFormat, quantised_kind, quantised_parameters, weight_bytes
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.serve.memory_estimate import EngineSpec
from colonnade.tune import prune, score_experts
from tests.models import CONFIGS
from tests.models import build as built
from tests.serve import tiny

SIZES = {18: 56_137, 24: 17_345, 32: 41_729}


@pytest.mark.parametrize("trits", SIZES)
def test_every_word_round_trips(trits) -> None:
    assert ternary.word_count(trits) == SIZES[trits]
    assert ternary.table(trits).nbytes == 512 * 1024
    words = torch.arange(SIZES[trits]).to(torch.int16)[:, None]
    values = ternary.decode(words, trits, trits, torch.float32)
    assert (values != 0).sum(1).max() == ternary.NONZERO[trits]
    assert len(values.unique(dim=0)) == SIZES[trits]
    assert torch.equal(ternary.encode(values, trits), words)


def test_the_last_word_is_padded() -> None:
    values = torch.zeros(2, 20)
    values[0, 19], values[1, 3] = -1, 1
    words = ternary.encode(values, 18)
    assert words.shape == (2, 2)
    assert torch.equal(ternary.decode(words, 18, 20, torch.float32), values)
    assert stored_bytes(2, 20, "ternary", 18) == 2 * (2 * 2 + 2)
    with pytest.raises(AssertionError, match="more than k"):
        ternary.encode(torch.ones(1, 18), 18)


def test_places_are_the_best_for_their_scale() -> None:
    generator = torch.Generator().manual_seed(0)
    w, h = torch.randn(1, 18, generator=generator), torch.rand(18, generator=generator)
    allowed, scale = ternary.choose_mask(w, 18, h)

    def loss(places: tuple[int, ...]) -> float:
        kept = torch.zeros_like(w)
        kept[0, list(places)] = w[0, list(places)].sign() * scale
        return float((h * (kept - w).square()).sum())

    chosen = tuple(allowed[0].nonzero().flatten().tolist())
    best = min(loss(places) for k in range(5) for places in combinations(range(18), k))
    assert loss(chosen) == pytest.approx(best, rel=1e-4)


@pytest.mark.parametrize(("trits", "below"), [(18, 0.40), (24, 0.56), (32, 0.62)])
def test_error_of_gaussian_weights(trits, below) -> None:
    w = torch.randn(64, 40 * trits, generator=torch.Generator().manual_seed(1))
    weight = quantise(w, "ternary", trits)
    assert weight.nbytes == stored_bytes(64, 40 * trits, "ternary", trits)
    rounded = dequantise(weight, torch.float32)
    share = float((rounded - w).square().sum() / w.square().sum())
    assert below - 0.05 < share < below
    assert torch.equal(dequantise(weight, torch.float32, slice(3, 9)), rounded[3:9])
    again = quantise(rounded, "ternary", trits)
    assert torch.equal(dequantise(again, torch.float32), rounded)


def test_gptq_is_never_worse_than_nearest() -> None:
    generator = torch.Generator().manual_seed(2)
    w = torch.randn(40, 70, generator=generator)
    x = torch.randn(500, 70, generator=generator) @ torch.randn(70, 70, generator=generator)
    hessian = (x.T @ x).double()
    errors = [
        error(dequantise(q, torch.float32) - w, damped(hessian))
        for q in (gptq(w, hessian, "ternary", 18), nearest(w, "ternary", 18))
    ]
    assert errors[0] < 0.9 * errors[1]
    plain = gptq(w, torch.eye(70, dtype=torch.float64), "ternary", 18)
    assert torch.equal(plain.values, nearest(w, "ternary", 18).values)


def mixture(vocab_size: int) -> ModelConfig:
    return ModelConfig(
        family="mixtral", vocab_size=vocab_size, layers=2, width=36, heads=4, kv_heads=2, head_width=8, ffn_width=72,
        context=64, moe=MoeConfig(experts=4, active=2, ffn_width=72),
    )  # fmt: skip


def test_only_experts_become_ternary(tmp_path) -> None:
    tokenizer, context = tiny.tokenizer(), DistributedContext.solo(torch.device("cpu"))
    config = mixture(tokenizer.vocab_size)
    model = built(config, dtype=torch.float32).requires_grad_(False)
    texts = [torch.arange(60) * (i + 1) % config.vocab_size for i in range(4)]
    before = weight_bytes(model)
    compress(model, Compression(weights="ternary"), texts)
    assert quantised_kind(model) == "ternary"
    weights = quantised_parameters(model)
    assert {name.rpartition(".")[2] for name in weights} == {"up", "gate", "down"}
    assert before - weight_bytes(model) > 0.95 * 4 * config.expert_parameters
    whole = api.Model(model, tokenizer, context, "m")
    api.save(whole, tmp_path / "t")
    with api.load(tmp_path / "t", device="cpu") as loaded, api.load(tmp_path / "t", weights="dense") as dense:
        for name, weight in quantised_parameters(loaded.transformer).items():
            assert torch.equal(weight.values, weights[name].values)
            assert torch.equal(weight.scales, weights[name].scales)
        tokens = texts[0].tolist()
        torch.testing.assert_close(loaded.logits(tokens), dense.logits(tokens))
        assert loaded.generate([1, 2, 3], max_tokens=8, temperature=0) == whole.generate(
            [1, 2, 3], max_tokens=8, temperature=0
        )
    with pytest.raises(CheckpointError, match="no ternary weights"):
        api.save(whole, tmp_path / "hf", format="hf")
    with pytest.raises(ConfigError, match="--weights ternary"):
        api.load(tmp_path / "t", weights="ternary")


def test_words_of_another_size_are_refused(tmp_path) -> None:
    """A checkpoint whose checksums match names a size that has no table."""
    model = built(mixture(67), dtype=torch.float32).requires_grad_(False)
    compress(model, Compression(weights="ternary", by="nearest"))
    folder = tmp_path / "t"
    api.save(api.Model(model, None, DistributedContext.solo(torch.device("cpu")), "m"), folder)
    meta, manifest = (json.loads((folder / name).read_text()) for name in ("checkpoint.json", "manifest.json"))
    for form in meta["quantised"].values():
        form["group"] = 17
    (folder / "checkpoint.json").write_text(json.dumps(meta))
    manifest["files"]["checkpoint.json"] = digest_of(folder / "checkpoint.json").model_dump()
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="ternary words have 18, 24, 32 weights, not 17"):
        api.load(folder)


def test_trits_are_rounded_straight_through() -> None:
    generator = torch.Generator().manual_seed(3)
    u = torch.randn(5, 40, generator=generator, requires_grad=True)
    trits = round_trits(u, 18)
    assert set(trits.detach().unique().tolist()) <= {-1.0, 0.0, 1.0}
    words = ternary.encode(trits.detach(), 18)  # at most 4 of a word are not 0
    assert torch.equal(ternary.decode(words, 18, 40, torch.float32), trits.detach())
    gradient = torch.randn(5, 40, generator=generator)
    trits.backward(gradient)
    assert torch.equal(u.grad, gradient)
    largest = u.detach()[:, :18].abs().topk(4, 1).indices
    assert not trits.detach()[:, :18].scatter(1, largest, 0.0).any()


def test_recovery_trains_trits() -> None:
    config = mixture(67).replace(init_std=0.2)
    model, teacher = (built(config, dtype=torch.float32).requires_grad_(False) for _ in range(2))
    texts = [torch.randint(67, (60,), generator=torch.Generator().manual_seed(i)) for i in range(5)]
    compress(model, Compression(weights="ternary"), texts)
    old = quantised_parameters(model)
    logits = api.Model(model, None, DistributedContext.solo(torch.device("cpu")), "m").logits(texts[0])
    before, same = recover(model, teacher, texts, 0)
    assert before == same
    again = api.Model(model, None, DistributedContext.solo(torch.device("cpu")), "m").logits(texts[0])
    assert torch.equal(logits, again)  # it starts from the very trits that were there
    before, after = recover(model, teacher, texts, 60)
    assert after < 0.9 * before
    changed = 0
    for name, weight in quantised_parameters(model).items():
        assert (weight.values.shape, weight.scales.dtype) == (old[name].values.shape, torch.bfloat16)
        changed += int((weight.values != old[name].values).sum())
    assert changed > 0
    assert not any(p.requires_grad for p in model.parameters())


def test_recovery_of_fewer_experts() -> None:
    config = mixture(67).replace(init_std=0.2)
    teacher = built(config, dtype=torch.float32).requires_grad_(False)
    texts = [torch.randint(67, (60,), generator=torch.Generator().manual_seed(i)) for i in range(5)]
    model = prune(teacher, score_experts(teacher, texts).reap_LE, 2).requires_grad_(False)
    compress(model, Compression(weights="ternary"), texts)
    before, after = recover(model, teacher, texts, 8)
    assert after < before
    assert {weight.values.shape[0] for weight in quantised_parameters(model).values()} == {2}


def test_what_cannot_be_ternary() -> None:
    with pytest.raises(ConfigError, match="ternary applies only to experts"):
        compress(built(CONFIGS["llama"], dtype=torch.float32), Compression(weights="ternary", by="nearest"))
    with pytest.raises(PlanError, match=r"etp=8 leaves each rank 9 of moe\.ffn_width 72"):
        check_quantised(mixture(67), "ternary", 18, tp=1, etp=8)
    check_quantised(mixture(67), "ternary", 18, tp=1, etp=4)


def test_memory_of_a_stored_model_is_estimated(tmp_path) -> None:
    """From the words of its files; an estimate without them, of a model that is to be made ternary, is refused."""
    model = built(mixture(101), dtype=torch.float32)
    compress(model, Compression(weights="ternary", by="nearest", word=24), [])
    formats = {name: StoredFormat.of(weight) for name, weight in quantised_parameters(model).items()}
    spec = EngineSpec(
        model.config, ServeConfig(weights="ternary", pages=4), torch.float32, torch.device("cpu"), formats=formats
    )
    assert spec.needs().weights == weight_bytes(model)
    draft = built(CONFIGS["llama"], dtype=torch.float32)
    drafted = spec.replace(draft=draft.config, serve=spec.serve.replace(draft="small"))
    assert drafted.needs().draft == weight_bytes(draft)
    with pytest.raises(ConfigError, match="ternary words have 18, 24, 32 weights, not 64"):
        spec.replace(formats={}).needs()


@pytest.mark.slow
def test_compressed_and_served_over_ranks(tmp_path, capfd) -> None:
    tokenizer, context = tiny.tokenizer(), DistributedContext.solo(torch.device("cpu"))
    model = built(mixture(tokenizer.vocab_size), dtype=torch.float32)
    api.save(api.Model(model, tokenizer, context, "m"), tmp_path / "m")
    words = ["--weights", "ternary", "--tokens", "600", "--word", "18"]
    main(["compress", str(tmp_path / "m"), str(tmp_path / "t"), *words])
    main(["compress", str(tmp_path / "m"), str(tmp_path / "two"), *words, "--plan.dp", "2", "--plan.ep", "2"])
    with api.load(tmp_path / "t", device="cpu") as one, api.load(tmp_path / "two", device="cpu") as two:
        for name, weight in quantised_parameters(one.transformer).items():
            assert torch.equal(weight.values, quantised_parameters(two.transformer)[name].values)
    texts = []
    for plan in ([], ["--plan.tp", "2", "--plan.ep", "2"], ["--plan.tp", "2", "--plan.etp", "2"]):
        capfd.readouterr()
        main(["generate", str(tmp_path / "t"), "a word", "--temperature", "0", "--max_tokens", "12", *plan])
        texts.append(capfd.readouterr().out)
    assert texts[0] == texts[1] == texts[2]
    with pytest.raises(SystemExit):
        main(["compress", str(tmp_path / "m"), str(tmp_path / "x"), *words, "--format", "hf"])
    assert "no ternary weights" in " ".join(capfd.readouterr().err.split())
    main(["compress", str(tmp_path / "m"), str(tmp_path / "x"), *words, "--recover", "2"])
    with api.load(tmp_path / "x", device="cpu") as recovered:
        assert quantised_kind(recovered.transformer) == "ternary"


@pytest.mark.parametrize("trits", cuda_ternary.TRITS)
def test_tables_in_shared_memory_give_every_word(trits: int) -> None:
    """As cuda_ternary.cu reads them; a word that is not used stays within the tables."""
    table = cuda_ternary.tables(trits).long() & 0xFFFFFFFF
    words = torch.arange(ternary.TABLE_WORDS)
    entry = table[torch.minimum(words, cuda_ternary.RANGE_OFFSET + words // 32)]
    within, border = words % 32, entry >> 24
    follows = within >= border
    rest_at = torch.where(follows, within - border, words - (entry & 0xFFFF))
    assert int(rest_at.min()) >= 0 and int(rest_at.max()) < len(table) - cuda_ternary.ENTRIES
    rest = table[cuda_ternary.ENTRIES + rest_at]
    offsets = [(entry >> 16 & 255) + 2 * follows, *(rest >> 8 * j & 255 for j in range(ternary.NONZERO[trits] - 1))]
    got = torch.zeros(len(words), trits + 1)  # the last one: zeros
    for offset in offsets:
        got[words, offset // 4] += torch.where(offset % 4 == 2, -1.0, 1.0)
    count = ternary.word_count(trits)
    expected = ternary.decode(words[:, None].to(torch.int16), trits, trits, torch.float32)
    assert torch.equal(got[:count, :trits], expected[:count])


def test_a_row_s_blocks_fit_the_shared_memory() -> None:
    limit = 227 * 1024
    for outputs, words, matrices, blocks in (
        (11008, 228, 1, 132),
        (14336, 228, 2, 132),
        (4096, 797, 1, 128),
        (64, 228, 1, 2),
    ):
        layout = cuda_ternary.layout(outputs, words, 18, matrices, 132, limit)
        assert layout is not None and layout.shared_bytes <= limit and layout.blocks == blocks
        assert layout.max_tiles * layout.blocks * cuda_ternary.BN >= outputs
    several = cuda_ternary.layout(100_000, 228, 18, 1, 132, limit)
    assert several is not None and several.blocks == 396
    assert cuda_ternary.layout(4096, 4000, 18, 1, 132, limit) is None  # x alone is larger
