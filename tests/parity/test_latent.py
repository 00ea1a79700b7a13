"""Latent attention from a compressed cache, over a ring, and compiled equals the explicit attention.

It is compared with transformers in test_hf_moe.py, and over tensor-parallel ranks in test_tensor_parallel.py.
"""

import pytest
import torch

from colonnade.config import LatentConfig, ModelConfig, Plan
from colonnade.errors import ConfigError
from colonnade.kernels.rotary import rotation
from colonnade.model import KVCache, Packed, Rows, Stream
from colonnade.model.attention import LatentAttention
from colonnade.model.context_parallel import Ring
from colonnade.model.rotary import frequencies
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.parallel.layout import layout_of
from tests.latent_steps import step
from tests.models import CONFIGS, build
from tests.worlds import assert_same, run

NAMES = ["latent", "latent_yarn_biased"]


def _serve(name: str, tp: int) -> None:
    """Prompts, prompt chunks and single tokens of two requests, against both requests in full without a cache."""
    config = CONFIGS[name]
    with DistributedContext.build(Plan(tp=tp)) as context:
        model, whole = build(config, context.axes), build(config)
        generator = torch.Generator().manual_seed(0)
        texts = [torch.randint(config.vocab_size, (n,), generator=generator) for n in (11, 9)]
        cache = KVCache(config, context.axes, pages=9, page_tokens=3, dtype=torch.float64)
        pages = [[8, 2, 5, 0], [1, 7, 3, 4]]
        with torch.no_grad():
            expected = [whole(Stream(t, torch.arange(len(t))), Packed.of([len(t)]), Rows()) for t in texts]
            for spans in ([(0, 5), (0, 1)], [(5, 6), (1, 7)], [(6, 7), (7, 8)], [(7, 11), (8, 9)]):
                positions, paged = step(cache, pages, spans)
                tokens = torch.cat([t[slice(*span)] for t, span in zip(texts, spans, strict=True)])
                logits = model(Stream(tokens, positions), paged, Rows())
                wanted = torch.cat([e[slice(*span)] for e, span in zip(expected, spans, strict=True)])
                assert_same(logits, wanted, what=f"{spans}")


@pytest.mark.sample(2)
@pytest.mark.parametrize("tp", [1, 2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_compressed_cache_gives_the_same_logits(name: str, tp: int) -> None:
    run(tp, _serve, name, tp)


def test_cache_stores_one_vector_per_token_and_layer() -> None:
    config = CONFIGS["latent"]
    cache = KVCache(config, pages=5, page_tokens=4, dtype=torch.float64)
    assert cache.bytes == 5 * 4 * config.layers * (7 + 4) * 8
    assert cache.bytes == 5 * KVCache.bytes_per_page(config, build(config).axes, 4, torch.float64)
    assert all(k is v for k, v in zip(cache.k, cache.v, strict=True))


def _ring(name: str, lengths: list[int]) -> None:
    """One layer on three ranks that share the tokens; the weights' gradients are summed over the ranks."""
    config, on = CONFIGS[name], {"device": torch.device("cpu"), "dtype": torch.float64}
    with DistributedContext.build(Plan(cp=3)) as context:
        cp, T = context.axes.cp, sum(lengths)
        draw = torch.Generator().manual_seed(1)
        whole, mine = LatentAttention(config, context.axes, **on), LatentAttention(config, context.axes, **on)
        with torch.no_grad():
            for p, q in zip(whole.parameters(), mine.parameters(), strict=True):
                q.copy_(p.normal_(generator=draw))
        x_TD, go_TD = (torch.randn(T, config.width, generator=draw, dtype=torch.float64) for _ in range(2))
        positions = torch.cat([torch.arange(n) for n in lengths])
        packed = Packed.of(lengths)
        turn = rotation(positions, *frequencies(config), torch.float64)
        y_TD = whole(x_TD.requires_grad_(), T, turn, packed)
        y_TD.backward(go_TD)
        ring = Ring.of(packed, T, cp)
        here = ring.index_t
        x_tD = x_TD.detach()[here].requires_grad_()
        turn = rotation(positions[here], *frequencies(config), torch.float64)
        y_tD = mine(x_tD, len(here), turn, ring)
        y_tD.backward(go_TD[here])
        assert_same(y_tD, y_TD[here], what="output")
        assert x_tD.grad is not None
        assert x_TD.grad is not None
        assert_same(x_tD.grad, x_TD.grad[here], what="input's gradient")
        for (what, p), q in zip(whole.named_parameters(), mine.parameters(), strict=True):
            assert p.grad is not None
            assert q.grad is not None
            assert_same(cp.sum_(q.grad), p.grad, what=what)


@pytest.mark.sample(2)
@pytest.mark.parametrize("lengths", [[12, 12], [5, 0, 1, 17]], ids=["equal", "ragged"])
@pytest.mark.parametrize("name", NAMES)
def test_ring_gives_the_same_values_and_gradients(name: str, lengths: list[int]) -> None:
    run(3, _ring, name, lengths)


def test_layout_and_parameter_count_include_every_weight() -> None:
    for name in NAMES:
        model = build(CONFIGS[name])
        assert layout_of(model).keys() == dict(model.named_parameters()).keys()
        assert sum(p.numel() for p in model.parameters()) == CONFIGS[name].parameters


def test_bad_latent_configs_are_refused() -> None:
    sizes = {"vocab_size": 9, "layers": 1, "width": 8, "heads": 2, "ffn_width": 4, "head_width": 6}
    for latent, message in (
        (LatentConfig(kv_rank=4, rope_width=3, v_width=4), "rope_width 3 must be even"),
        (LatentConfig(kv_rank=4, rope_width=6, v_width=4), "leave some of head_width 6"),
        (LatentConfig(kv_rank=4, rope_width=2, v_width=8), "v_width 8 is more than head_width 6"),
    ):
        with pytest.raises(ConfigError, match=message):
            ModelConfig(latent=latent, **sizes)
    with pytest.raises(ConfigError, match="leave window at its default"):
        ModelConfig(latent=LatentConfig(kv_rank=4, rope_width=2, v_width=4), window=3, **sizes)
