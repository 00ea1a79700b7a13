"""8-bit latent caches: rounding error, page size, and equal results from every reader."""

import dataclasses
from pathlib import Path

import pytest
import torch

from colonnade import api, chat
from colonnade.config import LatentConfig, Plan, ServeConfig
from colonnade.config.presets import preset
from colonnade.errors import ConfigError
from colonnade.kernels.attention import cache_write
from colonnade.kernels.registry import KERNELS
from colonnade.model import KVCache, Packed, Rows, Stream
from colonnade.model.cache import Pools
from colonnade.parallel.axis import SOLO_AXES
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.serve import Engine, SamplingParams
from colonnade.serve.memory_advice import remedies
from colonnade.serve.memory_estimate import EngineSpec
from tests.latent_steps import step
from tests.models import CONFIGS, build
from tests.serve import tiny
from tests.serve.ranks import COUNT, LATENT, LIMITS, PROMPTS
from tests.worlds import assert_same

CPU = torch.device("cpu")
KINDS = ["int8", "float8"]
RANK = 20


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [1.0, 1e-12, 1e12])
def test_rounding_error_is_bounded(kind: cache_write.LatentKind, scale: float) -> None:
    """A large rotary key does not affect the precision of the latent next to it."""
    x = torch.randn(50, RANK + 6, generator=torch.Generator().manual_seed(0)) * scale
    x[:, RANK:] *= 1000
    x[7], x[8, 1:] = 0, 0
    values, scales = cache_write.quantise_latents(x, RANK, kind)
    got = cache_write.dequantise_latents(values[:, None], scales, RANK, torch.float64)[:, 0]
    assert values.dtype.itemsize == 1 and scales.shape == (50, 2) and not got[7].any()
    for part in (slice(RANK), slice(RANK, None)):
        highest = x[:, part].abs().amax(1, keepdim=True)
        bound = highest / 127 / 2 if kind == "int8" else (x[:, part].abs() / 16).maximum(highest * 2.0**-17)
        error = (got[:, part] - x[:, part].double()).abs()
        assert (error <= 1.001 * bound).all() and (error > bound / 10).any()


def test_non_finite_values_stay_non_finite() -> None:
    x = torch.ones(3, RANK + 6)
    x[1, 2], x[2, RANK] = torch.inf, torch.nan
    for kind in KINDS:
        values, scales = cache_write.quantise_latents(x, RANK, kind)
        finite = cache_write.dequantise_latents(values[:, None], scales, RANK, torch.float32)[:, 0].isfinite()
        assert finite[0].all() and not finite[1, :RANK].any() and not finite[2, RANK:].any()


class RoundedCache(KVCache):
    """Specification: a cache in the model's dtype, holding values that 8 bits can represent."""

    kind: cache_write.LatentKind

    def at(self, layer: int) -> Pools:
        cache = self

        class Round(Pools):
            def write(self, slots_T, k_TkH, v_TkH) -> None:
                assert cache.value_width is not None
                values, scales = cache_write.quantise_latents(k_TkH[:, 0], cache.value_width, cache.kind)
                k_TkH = cache_write.dequantise_latents(values[:, None], scales, cache.value_width, k_TkH.dtype)
                super().write(slots_T, k_TkH, k_TkH)

        pools = super().at(layer)
        return Round(**{field.name: getattr(pools, field.name) for field in dataclasses.fields(Pools)})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["latent", "latent_yarn_biased"])
@pytest.mark.parametrize(
    "row",
    [r for r in KERNELS if r.operation == "paged_attention" and (torch.float64 in r.dtypes or "cuda" in r.devices)],
    ids=lambda row: row.name,
)
def test_prompts_chunks_and_decodes_read_the_rounded_cache(row, name: str, kind: cache_write.LatentKind) -> None:
    if "cpu" not in row.devices:
        pytest.skip("a GPU's: tests/interpreted_latent.py and tests/gpu/test_cascade_gpu.py")
    config, generator = CONFIGS[name], torch.Generator().manual_seed(0)
    model = build(config)
    texts = [torch.randint(config.vocab_size, (n,), generator=generator) for n in (11, 9)]
    on = {"pages": 9, "page_tokens": 3, "dtype": torch.float64}
    cache, exact = KVCache(config, **on, kind=kind), RoundedCache(config, **on)
    exact.kind = kind
    errors = []
    with torch.no_grad():
        plain = [model(Stream(t, torch.arange(len(t))), Packed.of([len(t)]), Rows()) for t in texts]
        for spans in ([(0, 5), (0, 1)], [(5, 6), (1, 7)], [(6, 7), (7, 8)], [(7, 11), (8, 9)]):
            logits = []
            for it in (cache, exact):
                positions, paged = step(it, [[8, 2, 5, 0], [1, 7, 3, 4]], spans)
                tokens = torch.cat([t[slice(*span)] for t, span in zip(texts, spans, strict=True)])
                paged = dataclasses.replace(paged, kernels=row.name)
                logits.append(model(Stream(tokens, positions), paged, Rows()))
            assert_same(*logits)
            expected = torch.cat([e[slice(*span)] for e, span in zip(plain, spans, strict=True)])
            errors.append(float((logits[0] - expected).norm() / expected.norm()))
    assert 1e-5 < max(errors) < (0.02 if kind == "int8" else 0.1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_takes_a_byte_per_value_and_two_scales(kind: cache_write.LatentKind) -> None:
    config = CONFIGS["latent"]
    cache = KVCache(config, pages=5, page_tokens=4, dtype=torch.float64, kind=kind)
    assert cache.bytes == 5 * 4 * config.layers * (7 + 4 + 2 * 4)
    assert cache.bytes == 5 * KVCache.bytes_per_page(config, SOLO_AXES, 4, torch.float64, kind)
    v3 = preset("deepseek-v3")
    stored, quantised = (KVCache.bytes_per_page(v3, SOLO_AXES, 64, torch.bfloat16, k) for k in ("stored", kind))
    assert quantised / stored == pytest.approx((576 + 8) / 1152)


def test_8_bits_double_the_tokens_or_halve_the_memory() -> None:
    model = tiny.model(dtype=torch.float32, **LATENT | {"latent": LatentConfig(kv_rank=56, rope_width=4, v_width=3)})
    limits = ServeConfig(cache_bytes=100_000, page_tokens=4, graph_capture=False)  # no scratch page in addition to them
    stored, quantised = (Engine(model, tiny.tokenizer(), limits.replace(cache=kind)) for kind in ("stored", "int8"))
    for engine in (stored, quantised):
        requested = EngineSpec(model.config, engine.config, torch.float32, CPU)
        assert requested.needs().cache == engine.cache.bytes <= 100_000
    assert quantised.cache.pages / stored.cache.pages == pytest.approx(60 * 4 / (60 + 8), rel=0.05)
    requested = EngineSpec(model.config, limits.replace(pages=100), torch.float32, CPU)
    saves = {flags: saves for flags, saves, _ in remedies(requested, requested.needs(), 1000, number=9)}
    assert 0 < saves["--serve.cache int8"] < 100 * 4 * 2 * (60 * 4 - 68)
    other = EngineSpec(tiny.config(), limits.replace(pages=100), torch.float32, CPU)
    saves = {flags: saves for flags, saves, _ in remedies(other, other.needs(), 1000, number=9)}
    assert "--serve.cache int8" not in saves, "int8 is for latents only"
    assert 0 < saves["--serve.cache float8"] < other.needs().cache
    assert not any(
        "serve.cache " in f
        for f, _, _ in remedies(other.replace(serve=limits.replace(cache="float8")), other.needs(), 1, 9)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_engine_output_does_not_depend_on_chunking(kind: cache_write.LatentKind) -> None:
    """In chunks, preempted, with shared prefixes, in padded steps or one by one: a token's bits are its own."""
    model = tiny.model(**LATENT)
    params = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)
    whole = ServeConfig(pages=64, page_tokens=3, cache=kind)
    outputs = [
        [c.token_ids for c in Engine(model, tiny.tokenizer(), limits).generate(PROMPTS, [params] * len(PROMPTS))]
        for limits in (
            whole,
            LIMITS.replace(cache=kind),
            LIMITS.replace(cache=kind, graph_capture=True),
            whole.replace(batch_invariant=True),
        )
    ]
    assert outputs[0] == outputs[1] == outputs[2] == outputs[3]
    assert len({token for text in outputs[0] for token in text}) > 5


def test_unsupported_settings_are_refused(tmp_path: Path) -> None:
    limits = ServeConfig(cache="int8")
    with pytest.raises(ConfigError, match=r"an int8 cache needs latent attention.*2 key/value heads.*use --serve"):
        Engine(tiny.model(), tiny.tokenizer(), limits)
    api.save(
        api.Model(tiny.model(dtype=torch.float32), tiny.tokenizer(), DistributedContext.solo(CPU), "m"), tmp_path / "m"
    )
    path = chat.ModelSpec(str(tmp_path / "m"), Plan(), limits, "cpu", "float32")
    with pytest.raises(ConfigError, match="an int8 cache needs latent attention"):
        path.open()
    with pytest.raises(ConfigError):
        ServeConfig(cache="int4")
