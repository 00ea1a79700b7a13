"""The float8 KV cache: written values, and attention over exactly those values."""

import pytest
import torch

from colonnade.config import ModelConfig, ServeConfig
from colonnade.errors import ConfigError
from colonnade.kernels.attention import cache_write, reference, sdpa
from colonnade.kernels.attention.page_table import PageTable
from colonnade.model import KVCache
from colonnade.serve import Engine, SamplingParams
from tests.serve import tiny

FLOAT8 = torch.float8_e4m3fn


def test_large_values_saturate_and_nan_stays_nan() -> None:
    x = torch.tensor([1.0, 1.06, -3e4, 449.0, 2.0**-9, 2.0**-11, torch.inf, torch.nan])
    expected = torch.tensor([1.0, 1.0, -448.0, 448.0, 2.0**-9, 0.0, 448.0, torch.nan])
    assert torch.equal(cache_write.to_cache_dtype(x, FLOAT8).float().nan_to_num(7), expected.nan_to_num(7))


def test_slots_are_written_and_read() -> None:
    pool, x = torch.zeros(3, 4, 2, 6, dtype=FLOAT8), torch.randn(5, 2, 6, dtype=torch.float64)
    slots = torch.tensor([11, 0, 7, 3, 4])
    cache_write.write_kv(pool, slots, x)
    rounded = cache_write.to_cache_dtype(x, FLOAT8).double()
    assert torch.equal(cache_write.read_kv(pool, slots, torch.float64), rounded)
    assert torch.equal(cache_write.read_kv(pool, torch.tensor([1, 2]), torch.float64), torch.zeros(2, 2, 6).double())
    assert ((rounded - x).abs() <= x.abs() / 16 + 2.0**-10).all()


@pytest.mark.parametrize("run", [reference.paged, sdpa.paged])
@pytest.mark.parametrize("window", [None, 5])
def test_attention_reads_the_rounded_values(run, window: int | None) -> None:
    """Two decodes of different lengths, a chunk and a whole prompt."""
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(9, 4, 2, 8, dtype=torch.float64, generator=generator) for _ in range(2))
    q = torch.randn(9, 4, 8, dtype=torch.float64, generator=generator)
    pages = torch.tensor([[0, 5, 2], [3, 8, 8], [1, 4, 8], [6, 7, 8]], dtype=torch.int32)
    ends, lengths = (torch.tensor(n, dtype=torch.int32) for n in ([0, 1, 2, 5, 9], [11, 2, 8, 4]))
    table = PageTable(pages, ends, lengths, 4, 4, 11)
    out = run(q, *(cache_write.to_cache_dtype(x, FLOAT8) for x in (k, v)), table, window=window)
    expected = reference.paged(
        q, *(cache_write.to_cache_dtype(x, FLOAT8).double() for x in (k, v)), table, window=window
    )
    assert out.dtype == torch.float64
    assert torch.allclose(out, expected, rtol=1e-12, atol=1e-12)


def test_engine_caches_twice_the_tokens_with_similar_output() -> None:
    config = ModelConfig(vocab_size=8, layers=2, width=8, heads=2, ffn_width=8)
    stored, float8 = (KVCache(config, pages=3, dtype=torch.bfloat16, kind=kind) for kind in ("stored", "float8"))
    assert stored.bytes == 2 * float8.bytes
    model = tiny.model()
    limits = ServeConfig(pages=16, page_tokens=3, token_budget=7, max_requests=3, cache="float8")
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompts = [[5, 6, 7], list(range(40, 57)), [3]]
    outputs = [done.token_ids for done in Engine(model, tiny.tokenizer(), limits).generate(prompts, [greedy] * 3)]
    at_once = limits.replace(token_budget=64, pages=64, graph_capture=True)
    assert outputs == [
        done.token_ids for done in Engine(model, tiny.tokenizer(), at_once).generate(prompts, [greedy] * 3)
    ]
    exact = [tuple(tiny.greedy_tokens(model, prompt, 12)) for prompt in prompts]
    assert sum(a == b for x, y in zip(outputs, exact, strict=True) for a, b in zip(x, y, strict=True)) > 12


def test_int8_cache_needs_latent_attention() -> None:
    with pytest.raises(ConfigError, match=r"int8 cache needs latent attention.* use --serve.cache float8"):
        ServeConfig(cache="int8").check(tiny.model().config)
