"""Packed = alone = paged, float64: any chunks of the targets, any pages, sources of one token and of many."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from colonnade.kernels.attention import cross, sdpa
from colonnade.model import EncoderDecoderAttend, KVCache, Packed, Paged, PagedMemory, Rows, Source, Stream, Transformer
from colonnade.model.cross_attention import with_relative_bias
from colonnade.model.relative_positions import bucket_of
from tests.encdec import SOURCES, TARGETS, inputs, nllb, random_model, switch, t5, texts
from tests.worlds import assert_same


def paged(model: Transformer, sources: list[Tensor], targets: list[Tensor], chunk: int, page_tokens: int) -> Tensor:
    """Logits of all targets, fed ``chunk`` tokens of each a pass, the sources in the first pass only."""
    cache = KVCache(model.config, pages=64, page_tokens=page_tokens, dtype=torch.float64)
    free = list(torch.randperm(64, generator=torch.Generator().manual_seed(0)).tolist())
    take = lambda n: [free.pop() for _ in range(-(-n // page_tokens))]  # noqa: E731
    own, far = [take(len(t)) for t in targets], [take(len(s)) for s in sources]

    def slots(pages: list[int], start: int, stop: int) -> list[int]:
        return [pages[i // page_tokens] * page_tokens + i % page_tokens for i in range(start, stop)]

    found: list[list[Tensor]] = [[] for _ in targets]
    for start in range(0, max(map(len, targets)), chunk):
        parts = [range(min(start, len(t)), min(start + chunk, len(t))) for t in targets]
        stream = Stream(
            torch.cat([t[p.start : p.stop] for t, p in zip(targets, parts, strict=True)]),
            torch.cat([torch.arange(p.start, p.stop) for p in parts]),
        )
        source = None
        new: list[int] = []
        if start == 0:
            positions = torch.cat([torch.arange(len(s)) for s in sources])
            stream = stream._replace(source=Source(torch.cat(sources), positions))
            source = Packed.of([len(s) for s in sources], causal=False)
            new = [slot for pages, s in zip(far, sources, strict=True) for slot in slots(pages, 0, len(s))]
        memory = PagedMemory.of(
            cache, torch.tensor(new, dtype=torch.int64), far, [len(s) for s in sources], [len(p) for p in parts]
        )
        most = max(map(len, own))
        ends = [0]
        for part in parts:
            ends.append(ends[-1] + len(part))
        written = [slot for pages, p in zip(own, parts, strict=True) for slot in slots(pages, p.start, p.stop)]
        attend = Paged(
            cache,
            torch.tensor([[*pages, *([0] * (most - len(pages)))] for pages in own], dtype=torch.int32),
            torch.tensor(written, dtype=torch.int64),
            torch.tensor(ends, dtype=torch.int32),
            torch.tensor([p.stop for p in parts], dtype=torch.int32),
            max(map(len, parts)),
            max(p.stop for p in parts),
        )
        logits = model(stream, EncoderDecoderAttend(attend, source, memory), Rows())
        for r, (a, b) in enumerate(itertools.pairwise(ends)):
            found[r].append(logits[a:b])
    return torch.cat([torch.cat(rows) for rows in found])


MODELS = {"1.0": t5("1.0"), "1.1": t5("1.1"), "switch": switch(), "nllb": nllb()}


@pytest.mark.sample(10)
@pytest.mark.parametrize("version", MODELS)
@pytest.mark.parametrize(("chunk", "page_tokens"), [(1, 4), (5, 1), (3, 16), (100, 7)])
def test_packed_alone_and_paged_are_equal(version: str, chunk: int, page_tokens: int) -> None:
    model = random_model(MODELS[version])
    sources, targets = texts(SOURCES, 53), texts(TARGETS, 53, seed=2)
    stream, attend = inputs(sources, targets)
    packed = model(stream, attend, Rows())
    alone = torch.cat(
        [model(*inputs([s], [t], "reference"), Rows()) for s, t in zip(sources, targets, strict=True)]
    )  # fmt: skip
    assert_same(packed, alone, 1e-10, "packed")
    assert_same(paged(model, sources, targets, chunk, page_tokens), alone, 1e-10, "paged")


def test_an_empty_target_and_a_source_without_target() -> None:
    model = random_model(t5())
    sources, targets = texts([3, 4], 53), texts([0, 2], 53)
    stream, attend = inputs(sources, targets)
    alone = model(*inputs(sources[1:], targets[1:]), Rows())
    assert_same(model(stream, attend, Rows()), alone, 1e-10, "logits")


def test_grouped_heads_and_rotary_positions() -> None:
    """The parts compose: no relative positions, fewer key/value heads."""
    model = random_model(
        t5(relative_positions=None, positions="rotary", head_width=6, kv_heads=2, score_scale=None, family="llama")
    )
    sources, targets = texts(SOURCES, 53), texts(TARGETS, 53, seed=2)
    packed = model(*inputs(sources, targets), Rows())
    assert_same(paged(model, sources, targets, 2, 4), packed, 1e-10, "paged")


def test_the_bridge_is_one_projection_for_each_layer() -> None:
    config = t5(kv_heads=2)
    model = random_model(config)
    assert model.bridge is not None
    x_SD = torch.randn(6, config.width, dtype=torch.float64)
    kv = model.bridge(x_SD, 6)
    weight = model.bridge.kv.weight.unflatten(0, (2, config.layers, 2, config.head_width))
    for layer in range(config.layers):
        for which in range(2):
            rows = weight[:, layer, which].flatten(0, 1)
            expected = (x_SD @ rows.T).unflatten(1, (2, config.head_width))
            assert_same(kv[:, :, layer, which], expected, 1e-10, "bridge")


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("buckets", "distance"), [(32, 128), (8, 12), (64, 33)])
def test_buckets_follow_the_formula(causal: bool, buckets: int, distance: int) -> None:
    offsets = torch.arange(-1000, 1001)
    found = bucket_of(offsets, buckets, distance, causal=causal).tolist()
    n = buckets if causal else buckets // 2
    for offset, bucket in zip(offsets.tolist(), found, strict=True):
        d = max(-offset, 0) if causal else abs(offset)
        expected = d
        if d >= n // 2:
            growth = math.log(d / (n // 2)) / math.log(distance / (n // 2)) * (n - n // 2)
            expected = min(n - 1, n // 2 + int(growth + 1e-6))  # float32 logarithms at a boundary
        assert bucket == expected + (n if not causal and offset > 0 else 0), offset
    assert len(set(found[: 1000 - distance])) == 1


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [[7, 7, 7], [9, 1, 14], [5, 0, 3]])
def test_batched_relative_attention_equals_the_plain_one(lengths: list[int], causal: bool) -> None:
    """Equal lengths are one call, unequal ones are padded to one on a GPU; values and all gradients."""
    generator = torch.Generator().manual_seed(3)
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    q, k, v = (draw(sum(lengths), 4, 6).requires_grad_() for _ in range(3))
    near, weight = draw(2 * 5 + 1, 4).requires_grad_(), draw(sum(lengths), 4, 6)
    expected = cross.relative_reference(q, k, v, ends, near, causal=causal)
    right = torch.autograd.grad((expected * weight).sum(), (q, k, v, near))
    mask = cross.relative_mask(near, max(lengths), causal=causal)
    equal = len(set(lengths)) == 1
    for found in (
        cross.relative_sdpa(q, k, v, ends, near, causal=causal, longest=max(lengths), equal=equal, bias_NTS=mask),
        cross.relative_sdpa(q, k, v, ends, near, causal=causal),
        cross.in_batches(cross._biased_of_lengths, q, k, v, ends, max(lengths), mask, equal=False),
    ):
        assert (found - expected).abs().max() < 1e-12
        gradients = torch.autograd.grad((found * weight).sum(), (q, k, v, near), retain_graph=True)
        for got, wanted in zip(gradients, right, strict=True):
            assert (got - wanted).abs().max() < 1e-11 * max(1.0, float(wanted.abs().max()))


@pytest.mark.parametrize(("targets", "sources"), [([4, 4], [7, 7]), ([4, 4], [7, 6]), ([3, 5], [2, 2])])
def test_equal_pairs_are_one_call(targets: list[int], sources: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The batched path runs for equal lengths only, and gives the logits of the plain implementation."""
    net, calls = random_model(t5("1.1")), list[int]()
    right = sdpa.attend
    monkeypatch.setattr(sdpa, "attend", lambda q, *args, **how: calls.append(len(q)) or right(q, *args, **how))
    pairs = texts(sources, 50), texts(targets, 50)
    found = net(*inputs(*pairs), Rows())
    assert (found - net(*inputs(*pairs, kernels="reference"), Rows())).abs().max() < 1e-12
    equal = len(set(targets)) == len(set(sources)) == 1
    assert calls == [2] * 2 if equal else [1] * 4


def test_relative_biases_leave_the_page_table() -> None:
    """A CUDA graph prepares the plans of a page table; a copy of the table would be planned anew in each pass."""
    one = torch.zeros(1, dtype=torch.int32)
    cache = KVCache(t5("1.1"), pages=2, page_tokens=4, dtype=torch.float64)
    own = Paged(cache, one[None], one.long(), torch.tensor([0, 1], dtype=torch.int32), one + 1, 1, 1)
    biased = with_relative_bias(own, torch.zeros(3, 4))
    assert isinstance(biased, Paged)
    assert biased.near_Rn is not None
    assert biased.table is own.table
