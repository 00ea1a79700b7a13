"""Segment attention: whole sequences against a plain reference and torchaudio's Emformer, streams against the whole."""

import importlib.util
import math
import subprocess
import sys
import zipfile

import pytest
import torch
from torch.nn import functional as F

from colonnade.config import ModelConfig, Plan
from colonnade.errors import CapacityError, ConfigError, DataError, PlanError
from colonnade.model.segment_encoder import SegmentEncoder
from colonnade.model.segments import Segments
from colonnade.parallel.axis import Axes
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.parallel.layout import layout_of, local_part
from colonnade.speech.streams import StreamPool
from tests.worlds import assert_same, run

D, HEADS = 12, 3
SIZES = [Segments(4, 6, 2), Segments(4, 6, 2, 3), Segments(3, 0, 0, 1), Segments(1, 2, 3, 2), Segments(5, 3, 7, 0)]
LENGTHS = [13, 1, 0, 8, 23]


def config(**changes) -> ModelConfig:
    biases = {"qkv_bias": True, "out_bias": True, "ffn_bias": True}
    shape = {"vocab_size": 8, "layers": 3, "width": D, "heads": HEADS, "ffn_width": 20}
    return ModelConfig(**(shape | {"norm": "layernorm", "gated": False, "activation": "relu"} | biases | changes))


def encoder(seed: int = 0, axes: Axes | None = None, **changes) -> SegmentEncoder:
    model = SegmentEncoder(config(init_std=0.3, **changes), *([axes] if axes else []), dtype=torch.float64).initialise(
        seed
    )
    whole = SegmentEncoder(model.config, dtype=torch.float64)
    layout = layout_of(model)
    with torch.no_grad():  # biases and norms away from 0 and 1
        for (name, x), (_, shape) in zip(model.named_parameters(), whole.named_parameters(), strict=True):
            if x.ndim == 1:
                noise = frames(*shape.shape, seed=sum(map(ord, name)))
                x.add_(0.3 * local_part(noise, layout[name], model.axes))
    return model


def frames(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def plain(model: SegmentEncoder, x: torch.Tensor, sizes: Segments) -> torch.Tensor:
    """Segment by segment in loops, from the equations of the module's docstring."""
    S, L, R, M = sizes.segment, sizes.left, sizes.right, sizes.memory
    T = len(x)
    starts = range(0, T, S)
    bodies, copies = x, [x[a + S : a + S + R] for a in starts]
    memories = [x[a : a + S].mean(0) for a in starts]
    for block in model.blocks:
        new_bodies, new_copies, new_memories = [], [], []
        qkv = block.attention.qkv

        def heads(rows, qkv=qkv):
            return F.linear(rows, qkv.weight, qkv.bias).view(len(rows), HEADS, 3, D // HEADS).unbind(2)

        def attention(queries, keys, block=block, heads=heads):
            q, (_, k, v) = heads(queries)[0], heads(keys)
            scores = torch.einsum("qnh,knh->nqk", q, k) / math.sqrt(D // HEADS)
            o = torch.einsum("nqk,knh->qnh", scores.softmax(-1), v).flatten(1)
            return F.linear(o, block.attention.out.weight, block.attention.out.bias)

        def finish(rows, block=block):
            h = F.linear(block.norm2(rows), block.ffn.up.weight, block.ffn.up.bias).relu()
            return block.norm3(rows + F.linear(h, block.ffn.down.weight, block.ffn.down.bias))

        for i, a in enumerate(starts):
            body, normed = bodies[a : a + S], block.norm1(bodies)
            near = torch.cat((normed[max(0, a - L) : a], normed[a : a + S], block.norm1(copies[i])))
            past = torch.stack(memories[max(0, i - M) : i]) if M and i else x[:0]
            y = attention(block.norm1(torch.cat((body, copies[i]))), torch.cat((past, near)))
            rows = finish(torch.cat((body, copies[i])) + y)
            new_bodies.append(rows[: len(body)])
            new_copies.append(rows[len(body) :])
            new_memories.append(attention(normed[a : a + S].mean(0)[None], near)[0].tanh())
        bodies, copies, memories = torch.cat(new_bodies), new_copies, new_memories
    return bodies


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_whole_sequences_equal_a_plain_reference(sizes):
    model, x = encoder(), frames(sum(LENGTHS), D).requires_grad_()
    y = model(x, sizes.batch(LENGTHS))
    weights = frames(*y.shape, seed=2)
    (grad,) = torch.autograd.grad((y * weights).sum(), x, retain_graph=True)
    grads = torch.autograd.grad((y * weights).sum(), list(model.parameters()))
    pieces = [plain(model, piece, sizes) for piece in x.split(LENGTHS) if len(piece)]
    reference = torch.cat(pieces)
    (their_grad,) = torch.autograd.grad((reference * weights).sum(), x, retain_graph=True)
    their_grads = torch.autograd.grad((reference * weights).sum(), list(model.parameters()))
    assert_same(y, reference)
    assert_same(grad, their_grad)
    for ours, theirs in zip(grads, their_grads, strict=True):
        assert_same(ours, theirs)


def stream_all(
    pool: StreamPool, inputs: list[torch.Tensor], cuts: list[int], sizes: list[Segments] | None = None
) -> list[torch.Tensor]:
    """All inputs through the pool at once, each cut into its own chunks; streams end at different steps."""
    streams = [pool.open(own) for own in sizes or [None] * len(inputs)]
    outputs = {stream: [] for stream in streams}
    places = [0] * len(inputs)
    while any(place < len(x) for place, x in zip(places, inputs, strict=True)):
        for i, (stream, x) in enumerate(zip(streams, inputs, strict=True)):
            if places[i] < len(x):
                pool.push(stream, x[places[i] : places[i] + cuts[i % len(cuts)]])
                places[i] += cuts[i % len(cuts)]
                if places[i] >= len(x):
                    pool.end(stream)
        while found := pool.step():
            for stream, y in found.items():
                outputs[stream].append(y)
    for stream in streams:
        pool.close(stream)
    return [torch.cat(outputs[stream]) if outputs[stream] else inputs[0][:0] for stream in streams]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("cuts", [[1], [3, 7, 100]], ids=str)
def test_streams_equal_whole_sequences(sizes, cuts):
    """Also a second time in the same slots, which hold the keys of the streams before."""
    model = encoder().requires_grad_(False)
    pool = StreamPool(model, sizes, len(LENGTHS))
    for seed in (1, 2):
        x = frames(sum(LENGTHS), D, seed=seed)
        whole = model(x, sizes.batch(LENGTHS)).split(LENGTHS)
        for y, reference in zip(stream_all(pool, list(x.split(LENGTHS)), cuts), whole, strict=True):
            assert_same(y, reference)


@pytest.mark.parametrize("memory", [0, 2])
def test_streams_of_different_sizes_share_steps(memory):
    """Each equals the whole sequence of its own sizes, also in slots that held a stream of other sizes."""
    model, chosen = encoder().requires_grad_(False), [(4, 2), (1, 0), (7, 3), (4, 0), (2, 3)]
    most = Segments(7, 6, 3, memory)
    pool = StreamPool(model, most, len(chosen))
    for shift in range(3):
        sizes = [Segments(S, 6, R, memory) for S, R in chosen[shift:] + chosen[:shift]]
        inputs = [frames(9 + 5 * i, D, seed=i + 10 * shift) for i in range(len(sizes))]
        found = stream_all(pool, inputs, [3, 8], sizes)
        for own, x, y in zip(sizes, inputs, found, strict=True):
            assert_same(y, model(x, own.batch([len(x)])))
    for other, problem in (
        (Segments(8, 6, 3, memory), "segment of 8 frames"), (Segments(7, 6, 4, memory), "4 after it"),
        (Segments(7, 7, 3, memory), "7 before"), (Segments(7, 6, 3, memory + 1), f"memory {memory + 1}"),
    ):  # fmt: skip
        with pytest.raises(DataError, match=problem):
            pool.open(other)
    assert len(pool.cache.free) == len(chosen)


def test_a_stream_alone_equals_one_among_64():
    sizes, model = Segments(4, 6, 2, 2), encoder().requires_grad_(False)
    inputs = [frames(10 + i % 9, D, seed=i) for i in range(64)]
    together = stream_all(StreamPool(model, sizes, 64), inputs, [5, 2, 9])
    for i in (0, 17, 63):
        (alone,) = stream_all(StreamPool(model, sizes, 1), inputs[i : i + 1], [4])
        assert_same(alone, together[i])


def test_grouped_key_value_heads_stream_alike():
    sizes = Segments(4, 6, 2, 2)
    model = encoder(heads=6, kv_heads=3, head_width=2).requires_grad_(False)
    x = frames(19, D)
    (y,) = stream_all(StreamPool(model, sizes, 2), [x], [6])
    assert_same(y, model(x, sizes.batch([19])))


def test_an_hour_takes_the_memory_of_a_second():
    sizes, model = Segments(8, 16, 2, 2), encoder(layers=1).requires_grad_(False)
    pool = StreamPool(model, sizes, 1)
    stream, before = pool.open(), pool.cache.cache_bytes
    storage = pool.cache.k_LBSkH.data_ptr()
    for i in range(250):
        pool.push(stream, frames(8, D, seed=i))
        pool.step()
        assert len(pool.waiting[stream]) <= sizes.segment + sizes.right
        assert pool.waiting[stream].untyped_storage().nbytes() <= 8 * D * (sizes.segment + sizes.right)
    assert (pool.cache.cache_bytes, pool.cache.k_LBSkH.data_ptr()) == (before, storage)
    assert before == 2 * 8 * (3 + 24 + 2) * D


def test_a_failed_step_may_be_repeated():
    sizes, model = Segments(4, 6, 2, 2), encoder().requires_grad_(False)
    pool, x = StreamPool(model, sizes, 1), frames(14, D)
    stream = pool.open()
    pool.push(stream, x)
    first = pool.step()[stream]
    handle = model.blocks[2].register_forward_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("lost")))
    with pytest.raises(RuntimeError, match="lost"):
        pool.step()
    handle.remove()
    pool.end(stream)
    rest = [pool.step()[stream] for _ in range(3)]
    assert_same(torch.cat((first, *rest)), model(x, sizes.batch([14])))


def _tensor_parallel(world: int) -> None:
    with DistributedContext.build(Plan(tp=world)) as context:
        sizes, x = Segments(4, 6, 2, 2), frames(19, D).requires_grad_()
        model, whole = encoder(axes=context.axes), encoder()
        reference = whole(x, sizes.batch([19]))
        reference.square().sum().backward()
        expected, x.grad = x.grad, None
        y = model(x, sizes.batch([19]))
        y.square().sum().backward()
        assert_same(y, reference)
        assert_same(x.grad, expected)
        layout, grads = layout_of(model), {name: p.grad for name, p in whole.named_parameters()}
        for name, p in model.named_parameters():
            assert_same(p.grad, local_part(grads[name], layout[name], context.axes))
        (streamed,) = stream_all(StreamPool(model.requires_grad_(False), sizes, 2), [x.detach()], [5])
        assert_same(streamed, reference)


def test_tensor_parallel_whole_and_streamed():
    run(3, _tensor_parallel, 3)


def test_refusals():
    with pytest.raises(ConfigError, match="segment is 0"):
        Segments(0, 1, 1)
    with pytest.raises(ConfigError, match="memory -1"):
        Segments(1, 1, 1, -1)
    with pytest.raises(DataError, match="-2"):
        Segments(1, 1, 1).batch([3, -2])
    with pytest.raises(PlanError, match=r"plan\.sp"):
        SegmentEncoder(config(), Axes(sequence_parallel=True))
    pool = StreamPool(encoder().requires_grad_(False), Segments(4, 4, 2), 1)
    stream = pool.open()
    with pytest.raises(CapacityError, match="all 1 streams"):
        pool.open()
    with pytest.raises(DataError, match="NaN"):
        pool.push(stream, torch.full((2, D), torch.nan))
    with pytest.raises(DataError, match=r"\(T, 12\)"):
        pool.push(stream, torch.zeros(2, 5))
    with pytest.raises(DataError, match="not open"):
        pool.push(7, torch.zeros(2, D))
    with pytest.raises(DataError, match="5 frames"):
        pool.cache.step([(stream, 5, 0)])
    with pytest.raises(DataError, match="one segment per step"):
        pool.cache.step([(stream, 4, 0), (stream, 4, 0)])
    pool.end(stream)
    with pytest.raises(DataError, match="has ended"):
        pool.push(stream, torch.zeros(2, D))
    assert pool.step() == {}
    pool.close(stream)
    with pytest.raises(DataError, match="not open"):
        pool.close(stream)
    assert pool.open() == stream


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """torchaudio's Emformer: its Python module alone, because its libraries need another torch."""
    folder = tmp_path_factory.mktemp("torchaudio")
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-q",
        "--no-deps",
        "--retries",
        "0",
        "--timeout",
        "30",
        "-d",
        str(folder),
        "torchaudio==2.11.0",
    ]
    try:
        done = subprocess.run(command, capture_output=True, timeout=150, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip("the torchaudio wheel did not arrive in 150 s")
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        pytest.skip("the torchaudio wheel cannot be had")
    with zipfile.ZipFile(wheels[0]) as wheel:
        (folder / "emformer.py").write_bytes(wheel.read("torchaudio/models/emformer.py"))
    spec = importlib.util.spec_from_file_location("torchaudio_emformer", folder / "emformer.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Emformer


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "T"), [(Segments(4, 6, 2), 20), (Segments(4, 6, 2, 3), 20), (Segments(4, 6, 0, 3), 18)], ids=str
)
def test_equals_torchaudio(theirs, sizes, T):
    """Their softmax is float32. The last R frames are context only; the last case ends in a short segment."""
    model = encoder().requires_grad_(False)
    peer = theirs(
        D, HEADS, 20, 3, sizes.segment, left_context_length=sizes.left, right_context_length=sizes.right,
        max_memory_size=sizes.memory, tanh_on_mem=True,
    ).double()  # fmt: skip
    for block, layer in zip(model.blocks, peer.emformer_layers, strict=True):
        qkv = {}
        for name in ("weight", "bias"):
            grouped = getattr(block.attention.qkv, name).unflatten(0, (HEADS, 3, D // HEADS))
            qkv[name] = [grouped[:, j].flatten(0, 1) for j in range(3)]
        pairs = {
            layer.attention.emb_to_query: (qkv["weight"][0], qkv["bias"][0]),
            layer.attention.emb_to_key_value: (torch.cat(qkv["weight"][1:]), torch.cat(qkv["bias"][1:])),
        }
        modules = {
            layer.attention.out_proj: block.attention.out,
            layer.layer_norm_input: block.norm1,
            layer.pos_ff[0]: block.norm2,
            layer.pos_ff[1]: block.ffn.up,
            layer.pos_ff[4]: block.ffn.down,
            layer.layer_norm_output: block.norm3,
        }
        pairs |= {their: (own.weight, own.bias) for their, own in modules.items()}
        with torch.no_grad():
            for their, (weight, bias) in pairs.items():
                their.weight.copy_(weight)
                their.bias.copy_(bias)
    x, R = frames(T + sizes.right, D), sizes.right
    reference, _ = peer.eval()(x[None], torch.tensor([T]))
    y = model(x, sizes.batch([T + R]))[:T]
    assert (y - reference[0]).abs().max() < 1e-6
