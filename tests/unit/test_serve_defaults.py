"""Serving defaults are resolved in one place; unsupported CUDA graph capture is refused on request."""

import importlib.util
import subprocess
import sys

import pytest
import torch

from colonnade.config import LatentConfig, MoeConfig, RouterConfig, ServeConfig
from colonnade.config.presets import preset
from colonnade.errors import ConfigError
from colonnade.kernels.attention import sdpa
from colonnade.kernels.registry import LOOKUP
from colonnade.parallel.axis import Axes, Axis, ExpertAxes
from colonnade.serve import Engine
from colonnade.serve.memory_advice import remedies
from colonnade.serve.memory_estimate import EngineSpec, scratch_pages
from colonnade.serve.resolve_config import EngineTraits, check_graph_capture, resolve_config
from tests.serve import tiny

GPU, CPU = torch.device("cuda"), torch.device("cpu")
MOE = MoeConfig(experts=4, active=2, ffn_width=6)
TWO = Axis("two", 2)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel registry of a machine with a GPU and Triton."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        monkeypatch.setitem(LOOKUP, ("paged_attention", "cuda", dtype, "triton"), sdpa.paged)


def gpu_traits(
    dtype: torch.dtype = torch.bfloat16, *, cp: int = 1, waiting: bool = False, **changes: object
) -> EngineTraits:
    return EngineTraits(tiny.config(**changes), dtype, GPU, cp, offloads_experts=waiting)


@pytest.mark.usefixtures("kernels")
def test_gpu_defaults_to_cuda_graphs_and_async_scheduling() -> None:
    latent = LatentConfig(kv_rank=300, rope_width=20, v_width=3)
    for traits in (
        gpu_traits(), gpu_traits(torch.float32), gpu_traits(window=7), gpu_traits(cp=2), gpu_traits(moe=MOE),
        gpu_traits(kv_heads=6, head_width=320, latent=latent),
    ):  # fmt: skip
        assert (
            resolve_config(ServeConfig(), traits).graph_capture,
            resolve_config(ServeConfig(), traits).async_scheduling,
        ) == (
            True,
            True,
        )
        assert (resolve_config(ServeConfig(), traits).budget, resolve_config(ServeConfig(), traits).page) == (2048, 64)
        explicit = ServeConfig(graph_capture=False, async_scheduling=False, pages=3, token_budget=7, page_tokens=5)
        assert resolve_config(explicit, traits) == explicit
        check_graph_capture(ServeConfig(graph_capture=True), traits)
    engine = Engine(tiny.model(), tiny.tokenizer())
    assert (engine.config.graph_capture, engine.config.async_scheduling) == (False, False)
    assert (engine.config.budget, engine.config.page, engine.cache.page_tokens) == (512, 16, 16)
    assert Engine(tiny.model(), tiny.tokenizer(), ServeConfig(batch_invariant=True)).config.graph_capture is False


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("site", "what"),
    [
        (gpu_traits(torch.float64), r"in float64 .* use another --dtype"),
        (gpu_traits(cp=2, window=7), r"of attention with a window over cp=2 .* use tp instead of cp"),
        (gpu_traits(head_width=258), r"of heads 258 wide \(at most 256\) .* use --device cpu"),
        (
            gpu_traits(moe=MOE, waiting=True),
            r"of experts offloaded to host memory .* remove --experts.layers_on_device",
        ),
        (
            EngineTraits(tiny.config(moe=MOE), torch.float16, GPU, exchanges_tokens=True),
            r"that exchange tokens between expert ranks",
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_unsupported_capture_is_off_and_refused_on_request(site: EngineTraits, what: str) -> None:
    resolved = resolve_config(ServeConfig(), site)
    assert (resolved.graph_capture, resolved.async_scheduling) == (False, True)
    check_graph_capture(ServeConfig(), site)
    check_graph_capture(resolved, site)
    with pytest.raises(ConfigError, match=rf"steps {what}") as caught:
        check_graph_capture(ServeConfig(graph_capture=True), site)
    assert "cannot be captured as CUDA graphs yet; remove --serve.graph_capture, or " in str(caught.value)


@pytest.mark.skipif(
    ("paged_attention", "cuda", torch.float32, "triton") in LOOKUP, reason="has triton and a GPU's torch"
)
def test_graph_capture_needs_triton() -> None:
    assert resolve_config(ServeConfig(), gpu_traits()).graph_capture is False
    with pytest.raises(ConfigError, match=r"steps without triton cannot be captured .* pip install triton"):
        check_graph_capture(ServeConfig(graph_capture=True), gpu_traits())


@pytest.mark.usefixtures("kernels")
def test_padded_steps_are_off_where_they_change_outputs() -> None:
    """Where padding could displace tokens, padded steps must be requested explicitly."""
    expert_choice = MOE.replace(router=RouterConfig(kind="expert_choice"))
    for traits in (
        gpu_traits(moe=MOE.replace(capacity=1.0)), gpu_traits(moe=expert_choice),
        EngineTraits(tiny.config(), torch.bfloat16, GPU, sequence_parallel=True),
    ):  # fmt: skip
        assert resolve_config(ServeConfig(), traits).graph_capture is False
        check_graph_capture(ServeConfig(graph_capture=True), traits)


def test_traits_are_read_from_the_model() -> None:
    assert EngineTraits.of(tiny.model()) == EngineTraits(tiny.config(), torch.float64, CPU)
    moe = tiny.config(moe=MOE)
    axes = Axes(tp=TWO, model=TWO, experts=ExpertAxes(ep=TWO, all=TWO, tokens=TWO))
    assert EngineTraits.of(tiny.model(axes, moe=MOE)) == EngineTraits(moe, torch.float64, CPU, exchanges_tokens=True)
    assert EngineTraits.of(tiny.model(axes.serving(), moe=MOE)) == EngineTraits(moe, torch.float64, CPU)
    assert EngineTraits.of(tiny.model(Axes(tp=TWO, sequence_parallel=True))).sequence_parallel
    offloaded = tiny.model(moe=MOE)
    for layer in offloaded.modules():
        if hasattr(layer, "fetch"):
            layer.fetch = lambda ends_e, rows: None
    assert EngineTraits.of(offloaded).offloads_experts


@pytest.mark.usefixtures("kernels")
def test_graph_memory_is_estimated_and_offered_as_a_remedy() -> None:
    llama = EngineSpec(preset("llama-2-7b"), ServeConfig(), torch.bfloat16, GPU)
    needs, explicit = (
        llama.needs(),
        EngineSpec(llama.model, ServeConfig(graph_capture=True), torch.bfloat16, GPU).needs(),
    )
    assert needs == explicit and needs.graphs > 32000 * 2 * 64
    plain = EngineSpec(llama.model, ServeConfig(graph_capture=False), torch.bfloat16, GPU).needs()
    assert plain.graphs == 0 and plain.cache < needs.cache
    offered = {flags: saves for flags, saves, _ in remedies(llama, needs, 12 << 30, number=9)}
    assert offered["--serve.graph_capture False"] == needs.total - plain.total
    assert not any(
        "fixed" in f for f, *_ in remedies(EngineSpec(llama.model, ServeConfig(), torch.bfloat16, CPU), plain, 1)
    )
    # With offloaded experts nothing is captured, and the scratch page is not needed.
    mixtral = EngineSpec(preset("mixtral-8x7b"), ServeConfig(), torch.bfloat16, GPU)
    assert mixtral.needs().graphs > 0 and mixtral.replace(layers_on_device=2).needs().graphs == 0
    assert mixtral.replace(layers_on_device=32).needs().graphs > 0
    assert scratch_pages(mixtral.axes, mixtral.resolved) == 1


CHOOSE_ATTENTION = """
import torch
torch.version.cuda = "13.0"  # as if this torch were built for GPUs; nothing is launched
from colonnade.kernels.attention import dispatch, sdpa, triton_decode
from colonnade.kernels.registry import choose
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    assert choose("paged_attention", "cuda", dtype) is dispatch.paged
    assert choose("paged_attention", "cuda", dtype, "sdpa") is sdpa.paged
    assert choose("paged_attention", "cuda", dtype, "triton") is triton_decode.paged
    assert choose("paged_attention", "cpu", dtype) is sdpa.paged
    assert choose("paged_attention", "cuda", dtype, "reference").__module__.endswith("reference")
assert choose("paged_attention", "cuda", torch.float64) is sdpa.paged
print("chosen")
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed: pip install triton")
def test_gpu_chooses_the_fastest_paged_attention() -> None:
    done = subprocess.run([sys.executable, "-c", CHOOSE_ATTENTION], capture_output=True, text=True, check=False)
    assert done.stdout == "chosen\n", done.stderr
