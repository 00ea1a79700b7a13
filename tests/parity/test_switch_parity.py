"""Switch Transformers against transformers: logits with a binding capacity, loss, gradients, and files both ways."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from colonnade.checkpoint.hf.read import HFFolder
from colonnade.checkpoint.hf.write import write_hf
from colonnade.errors import CheckpointError
from colonnade.model import IGNORE, Rows, Stream, Transformer, initialise
from colonnade.model.moe import Routing, TokenGroups
from colonnade.parallel.axis import SOLO
from colonnade.train.model_inputs import StepContext, model_inputs
from colonnade.verify.trial import batch as draw_batch
from tests.encdec import SOURCES, TARGETS, inputs, switch, texts
from tests.hf import load
from tests.hf_reference import same_loss_and_gradients
from tests.parity.test_t5_parity import SETTINGS as T5_SETTINGS
from tests.parity.test_t5_parity import logits
from tests.worlds import assert_same

SETTINGS: dict[str, Any] = T5_SETTINGS | {
    "num_layers": 5, "num_decoder_layers": 4, "num_sparse_encoder_layers": 2, "num_sparse_decoder_layers": 1,
    "num_experts": 3, "expert_capacity": 3, "router_jitter_noise": 0.0,
}  # fmt: skip


def theirs(**changes: object) -> Any:
    """transformers' model in float64, its weights large enough for every part to matter."""
    torch.manual_seed(5)
    config = transformers.SwitchTransformersConfig(**SETTINGS | changes)
    model = transformers.SwitchTransformersForConditionalGeneration(config).double()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p) * 0.2 + (1.0 if p.dim() == 1 else 0.0))
    return model.eval()


def with_sequences(stream: Stream, lengths: list[int]) -> Stream:
    """``stream`` of whole targets, whose experts have a capacity too."""
    T = sum(lengths)
    groups = TokenGroups.sequences(torch.tensor([0, *lengths]).cumsum(0), T, SOLO)
    return stream._replace(routing=Routing(torch.arange(T), token_groups=groups))


def gradients_of_all(model: Any) -> dict[str, Tensor]:
    """Each parameter's gradient by name; zeros for an expert without a token."""
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}


def test_logits_loss_and_gradients_with_binding_capacity(tmp_path: Path) -> None:
    model = theirs()
    model.save_pretrained(tmp_path)
    ours = load(tmp_path)
    moe = ours.config.moe
    assert moe is not None
    assert ours.config.encoder is not None
    assert [i for i in range(ours.config.total_layers) if ours.config.experts_of(i)] == [1, 5, 7]
    sources, targets, labels = texts(SOURCES, 53), texts(TARGETS, 53, seed=2), texts(TARGETS, 53, seed=3)
    stream, attend = inputs(sources, targets)
    whole, expected = with_sequences(stream, TARGETS), logits(model, sources, targets)
    assert_same(ours(whole, attend, Rows()), expected.detach(), 1e-6, "logits")
    assert whole.routing is not None
    assert whole.routing.reports[1].dropped > 0, "the capacity binds"

    same_loss_and_gradients(
        ours, model, (whole, attend), expected, torch.cat(labels), tolerance=3e-6, gradients=gradients_of_all
    )

    # Sources drop as trained in every pass; a decoder whose sequences are unknown drops nothing.
    model.config.expert_capacity = 10**6
    for each in model.decoder.modules():
        if hasattr(each, "expert_capacity"):
            each.expert_capacity = 10**6
    with torch.no_grad():
        dropless = logits(model, sources, targets)
        assert (dropless - expected).abs().max() > 0.1
        assert_same(ours(stream, attend, Rows()), dropless, 1e-6, "dropless targets")


@pytest.mark.parametrize("changes", [{}, {"num_sparse_encoder_layers": 5, "num_sparse_decoder_layers": 0}])
def test_files_both_ways_bit_for_bit(tmp_path: Path, changes: dict[str, int]) -> None:
    theirs(**changes).save_pretrained(tmp_path / "theirs")
    write_hf(load(tmp_path / "theirs"), tmp_path / "ours")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "ours"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert HFFolder(tmp_path / "ours").config == HFFolder(tmp_path / "theirs").config
    again = transformers.SwitchTransformersForConditionalGeneration.from_pretrained(
        tmp_path / "ours", dtype=torch.float64
    ).eval()
    sources, targets = texts(SOURCES, 53), texts(TARGETS, 53, seed=2)
    stream, attend = inputs(sources, targets)
    with torch.no_grad():
        found: Tensor = load(tmp_path / "theirs")(with_sequences(stream, TARGETS), attend, Rows())
        assert_same(found, logits(again, sources, targets), 1e-6, "logits")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("router_bias", True, "a router bias is not implemented"),
        ("num_sparse_decoder_layers", 9, "the stack has 4 blocks"),
        ("encoder_sparse_step", 3, "requires 2; make them agree"),
    ],
)
def test_refused_files(tmp_path: Path, key: str, value: object, message: str) -> None:
    transformers.SwitchTransformersConfig(**SETTINGS).save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {key: value}))
    with pytest.raises(CheckpointError, match=message):
        HFFolder(tmp_path)


def test_router_losses_of_the_encoder_have_their_own_weight() -> None:
    model = initialise(Transformer(switch(), dtype=torch.float64), 0)
    batch = draw_batch([5, 9, 2], 0, 1, model.config)
    batch.targets_T.fill_(IGNORE)
    routers = [f"{name}.ffn.router.gates.0.weight" for name in ("blocks.1", "encoder_blocks.1")]

    def gradients(of_targets: float, of_sources: float) -> list[Tensor]:
        weights = (torch.tensor(each, dtype=torch.float64) for each in (of_targets, of_sources))
        context = StepContext(router_loss_weight=next(weights), source_router_loss_weight=next(weights))
        total, _ = model(*model_inputs(batch, model, context))
        return list(torch.autograd.grad(total, [model.get_parameter(name) for name in routers]))

    decoder, encoder = gradients(1, 2)
    assert_same(gradients(1, 0)[0], decoder, 1e-12, "the decoder's")
    assert_same(2 * gradients(0, 1)[1] + gradients(1, 0)[1], encoder, 1e-12, "the encoder's")
    assert min(decoder.abs().max(), gradients(0, 1)[1].abs().max()) > 1e-4
