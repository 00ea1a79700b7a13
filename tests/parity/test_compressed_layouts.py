"""Compressed checkpoints load as stored under every serving plan: the same values, logits and greedy tokens."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from colonnade import api
from colonnade.checkpoint import native
from colonnade.checkpoint.load_model import open_model
from colonnade.compress import Compression, compress
from colonnade.config import Plan, TrainConfig
from colonnade.errors import CheckpointError, ConfigError, PlanError
from colonnade.kernels.linear.quantise import dequantise
from colonnade.model import Transformer
from colonnade.model.weight_only_quant import dense, quantised_parameters, weight_bytes
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.parallel.fsdp import masters
from colonnade.serve.staged_weights import StagedWeights
from colonnade.train.optimizer import AdamW
from tests.models import build
from tests.parity.test_quantised_tp import CONFIG, MIXTURES, UNEVEN, _load, _load_experts
from tests.worlds import assert_same, run

TEXTS = [torch.randint(301, (60,), generator=torch.Generator().manual_seed(i)) for i in range(4)]


def write(folder: Path, config, **settings) -> Transformer:
    """A compressed model, saved as ``folder``."""
    model = build(config, dtype=torch.float32).requires_grad_(False)
    compress(model, Compression(weight_group=32, **settings), TEXTS)
    api.save(api.Model(model, None, DistributedContext.solo(torch.device("cpu")), "tiny"), folder)
    return model


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("config", "settings"),
    [
        (CONFIG, {"weights": "int4"}),
        (CONFIG, {"weights": "int4", "grid": "zero", "by": "nearest"}),
        (CONFIG.replace(tied=True), {"weights": "int4", "grid": "symmetric"}),
        (UNEVEN, {"weights": "int8"}),
        (UNEVEN, {"weights": "float8", "by": "nearest"}),
        (CONFIG, {"weights": "int8_dynamic"}),
    ],
    ids=["int4", "zero", "symmetric", "int8", "float8", "int8_dynamic"],
)
def test_two_ranks_load_what_one_process_compressed(config, settings, tmp_path) -> None:
    model = write(tmp_path / "m", config, **settings)
    ((alone, tokens, bits),) = run(1, _load, tmp_path / "m", 1, "stored")
    down = quantised_parameters(model)["blocks.1.ffn.down.weight"]
    assert torch.equal(bits["values"], down.values.view(torch.uint8))
    assert torch.equal(bits["scales"], down.scales)
    both = run(2, _load, tmp_path / "m", 2, "stored")
    for logits, _, _ in both:
        assert_same(logits, alone, 1e-12)
    assert both[0][1] == tokens
    assert torch.equal(torch.cat([part["values"] for _, _, part in both], 1), bits["values"])
    whole = [part["scales"] for _, _, part in both]
    assert torch.equal(torch.cat(whole, 1) if settings["weights"] == "int4" else whole[0], bits["scales"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings", "plan"),
    [
        ("gated", {"weights": "int4", "grid": "zero"}, Plan(tp=2, ep=2)),
        ("gated", {"weights": "int4"}, Plan(tp=2, etp=2)),
        ("gated", {"weights": "int4"}, Plan(cp=2)),
        ("biased", {"weights": "int8", "by": "nearest"}, Plan(tp=4, ep=2, etp=2)),
    ],
    ids=str,
)
def test_experts_are_cut_in_whole_groups(name, settings, plan, tmp_path) -> None:
    write(tmp_path / "m", MIXTURES[name], **settings)
    ((alone, tokens, bits),) = run(1, _load_experts, tmp_path / "m", Plan(), "stored")
    ranks = run(plan.world, _load_experts, tmp_path / "m", plan, "stored")
    for rank, (logits, _, mine) in enumerate(ranks):
        assert_same(logits, alone, 1e-12)
        ep, etp = rank // plan.etp % plan.ep, rank % plan.etp
        for part, held in mine.items():
            share, cut = bits[part].chunk(plan.ep)[ep], 2 if part.startswith("down") else 1
            assert torch.equal(held, share.chunk(plan.etp, cut)[etp] if share.shape[cut] > 1 else share), part
    assert ranks[0][1] == tokens


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[Path, Transformer]:
    folder = tmp_path_factory.mktemp("compressed") / "m"
    return folder, write(folder, MIXTURES["gated"], weights="int4", by="nearest")


def test_dense_dequantises(saved) -> None:
    folder, model = saved
    with api.load(folder, weights="dense", dtype="float32", device="cpu") as loaded:
        for name, weight in quantised_parameters(model).items():
            assert torch.equal(loaded.transformer.get_parameter(name), dense(name, weight)), name
        down = quantised_parameters(model)["blocks.1.ffn.experts.down"]
        assert torch.equal(
            loaded.transformer.get_parameter("blocks.1.ffn.experts.down")[3],
            dequantise(down.matrix(3), torch.float32).T,
        )


def test_stored_needs_the_stored_memory_and_saves_again(saved, tmp_path) -> None:
    folder, model = saved
    with api.load(folder, dtype="float32", device="cpu") as loaded:
        assert weight_bytes(loaded.transformer) == weight_bytes(model)
        assert "weights in int4" in repr(loaded)
        api.save(loaded, tmp_path / "again")
    for file in ("weights-00000.safetensors", "tensors.json"):
        assert (tmp_path / "again" / file).read_bytes() == (folder / file).read_bytes()


def test_training_starts_from_it(saved) -> None:
    folder, model = saved
    shape = Transformer(model.config)
    context = DistributedContext.solo(torch.device("cpu"))
    weights = masters(shape, context, torch.float32)
    open_model(folder).load_masters(shape, context, weights)
    for name, weight in quantised_parameters(model).items():
        assert torch.equal(shape.get_parameter(name), dense(name, weight)), name


def test_a_served_model_takes_it_as_stored(saved) -> None:
    folder, model = saved
    with api.load(folder, dtype="float32", device="cpu") as loaded:
        staged = StagedWeights(loaded.transformer)
        staged.read(open_model(folder), loaded.context)
        staged.finish()
        for weight in quantised_parameters(loaded.transformer).values():
            weight.values.zero_()
        staged.copy()
        for name, weight in quantised_parameters(loaded.transformer).items():
            assert torch.equal(weight.values, quantised_parameters(model)[name].values)


def test_refusals(saved, tmp_path) -> None:
    folder, model = saved
    with pytest.raises(ConfigError, match=r"in int4 already.*remove --serve.weights"):
        api.load(folder, weights="int8", device="cpu")
    write(tmp_path / "m", CONFIG.replace(ffn_width=96), weights="int4", by="nearest")
    with pytest.raises(PlanError, match="cuts a group in two"):
        api.load(tmp_path / "m", plan=Plan(tp=2), device="cpu")
    shape = Transformer(model.config)
    weights = masters(shape, DistributedContext.solo(), torch.float32)
    optimizer = AdamW(weights.local, TrainConfig())
    with pytest.raises(CheckpointError, match="stores quantised weights, which a run cannot resume"):
        native.load(folder, shape, DistributedContext.solo(), masters=weights, optimizer=optimizer)


def test_hostile_formats(saved, tmp_path) -> None:
    """A checkpoint whose metadata claims another format of its tensors."""
    folder, _ = saved
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    meta = json.loads((copy / "checkpoint.json").read_text())
    name = next(iter(meta["quantised"]))
    for change, message in (
        ({"kind": "int8", "group": 32, "wide_scales": False}, "says that .* in int8"),
        ({"kind": "int4", "group": 32, "wide_scales": True}, "says that .* in int4.*float32 values"),
        ({"kind": "int4", "group": 64, "wide_scales": False}, "says that"),
        ({"kind": "int3", "group": 64, "wide_scales": False}, "does not fit this version"),
        ({"kind": "int4", "group": 10**12, "wide_scales": False}, "does not fit this version"),
    ):
        changed = meta | {"quantised": meta["quantised"] | {name: change}}
        (copy / "checkpoint.json").write_text(json.dumps(changed))
        _sign(copy)
        with pytest.raises((CheckpointError, ConfigError), match=message):
            api.load(copy, device="cpu")


def _sign(folder: Path) -> None:
    """Make the manifest agree with a changed checkpoint.json, as an attacker would."""
    from colonnade.checkpoint.atomic_folder import digest_of

    manifest = json.loads((folder / "manifest.json").read_text())
    digest = digest_of(folder / "checkpoint.json")
    entry = manifest["files"]["checkpoint.json"]
    entry.update({key: getattr(digest, key) for key in entry})
    (folder / "manifest.json").write_text(json.dumps(manifest))


MIXTURE = MIXTURES["gated"].replace(moe=MIXTURES["gated"].moe.replace(capacity=1.0))
"""Its texts drop tokens, each by itself."""


def _compressed(config, plan: Plan, settings: dict, folder: Path | None) -> dict[str, torch.Tensor]:
    """The components of all quantised parameters of this rank, norms too; rank 0 of the plan's ranks saves."""
    with DistributedContext.build(plan) as context:
        model = Transformer(config, context.axes).requires_grad_(False)
        source = build(config, dtype=torch.float32)
        tensors = dict(source.named_parameters())
        for name, parameter in model.named_parameters():
            whole = tensors[name]
            first, stop = context.axes.experts.ep.part(len(whole)) if whole.shape != parameter.shape else (0, None)
            parameter.copy_(whole[first:stop])
        compress(model, Compression(weight_group=32, **settings), TEXTS[:3])
        if folder is not None:
            api.save(api.Model(model, None, context, "m"), folder)
        bits = {f"{name}.{part}": t for name, w in quantised_parameters(model).items()
                for part, t in (("values", w.values.view(torch.uint8)), ("scales", w.scales))}  # fmt: skip
        return bits | {name: p.detach() for name, p in model.named_parameters() if "norm" in name}


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("config", "settings", "plans"),
    [
        (CONFIG, {"weights": "int4"}, [Plan(dp=2)]),
        (MIXTURE, {"weights": "int4", "grid": "zero"}, [Plan(dp=2, ep=2), Plan(dp=4, ep=4)]),
        (MIXTURE, {"weights": "int8_dynamic"}, [Plan(dp=2)]),
        (MIXTURE, {"weights": "float8", "by": "nearest"}, [Plan(dp=2, ep=2)]),
    ],
    ids=["dp=2", "ep=2, ep=4", "experts over dp=2", "ep=2, nearest"],
)
def test_several_ranks_compress_to_the_bits_of_one(config, settings, plans, tmp_path) -> None:
    (alone,) = run(1, _compressed, config, Plan(), settings, tmp_path / "1")
    for plan in plans:
        folder = tmp_path / str(plan)
        for rank, mine in enumerate(run(plan.world, _compressed, config, plan, settings, folder)):
            assert mine.keys() == alone.keys()
            for name, bits in mine.items():
                whole = alone[name]
                if bits.shape != whole.shape:
                    whole = whole.chunk(plan.ep)[rank % plan.ep]
                assert torch.equal(bits, whole), (plan, rank, name)
        with api.load(folder, device="cpu") as ours, api.load(tmp_path / "1", device="cpu") as expected:
            assert torch.equal(ours.logits(torch.arange(20)), expected.logits(torch.arange(20)))


def _refused(plan: Plan) -> str:
    with DistributedContext.build(plan) as context:
        try:
            compress(Transformer(CONFIG, context.axes), Compression(), TEXTS)
        except PlanError as error:
            return str(error)
    return ""


def test_other_layouts_are_refused() -> None:
    assert "the plan has tp=2" in run(2, _refused, Plan(tp=2))[0]
