"""NLLB-MoE against an oracle made of transformers' parts, because its own mixture of experts is wrong.

``NllbMoeTop2Router`` returns a one-hot mask, and ``NllbMoeExperts`` takes it for expert numbers and makes it one-hot
again: a token "goes" to expert 0 or 1 only, whatever the router says. The oracle is its router's weights with all of
its experts, y = Σ_e w_e · expert_e(x) · (1 − moe_token_dropout), in all of its other code.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor
from transformers.models.nllb_moe.modeling_nllb_moe import NllbMoeSparseMLP

from colonnade.checkpoint.hf.read import HFFolder
from colonnade.checkpoint.hf.write import write_hf
from colonnade.model import Dropout, DropoutRates, Rows
from colonnade.model.moe import LayerRouting, MixtureOfExperts, Routing
from colonnade.parallel.axis import SOLO_AXES
from tests.encdec import SOURCES, TARGETS, inputs, nllb, texts
from tests.hf import load
from tests.hf_reference import same_loss_and_gradients
from tests.parity.test_t5_parity import logits
from tests.worlds import assert_same

SETTINGS: dict[str, Any] = {
    "vocab_size": 53, "d_model": 24, "encoder_layers": 4, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 30, "decoder_ffn_dim": 30, "max_position_embeddings": 64,
    "num_experts": 5, "encoder_sparse_step": 2, "decoder_sparse_step": 2, "dropout": 0.0, "attention_dropout": 0.0,
    "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0,
}  # fmt: skip


def theirs() -> Any:
    """transformers' model in float64, its weights large enough for every part to matter."""
    torch.manual_seed(8)
    model = transformers.NllbMoeForConditionalGeneration(transformers.NllbMoeConfig(**SETTINGS)).double()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p) * 0.2 + (1.0 if p.dim() == 1 else 0.0))
    return model.eval()


def mixture(self: Any, hidden_states: Tensor, padding_mask: Tensor | None = None) -> Tensor:
    """What NllbMoeSparseMLP should compute."""
    x_TD = hidden_states.flatten(0, 1)
    _, weights_TE, _ = self.router(x_TD, None)
    parts = [self.experts[f"expert_{e}"](x_TD) * weights_TE[:, e, None] for e in range(self.num_experts)]
    return (torch.stack(parts).sum(0) * (1 - self.experts.moe_token_dropout)).view_as(hidden_states)


def test_logits_loss_and_gradients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = theirs()
    model.save_pretrained(tmp_path)
    ours = load(tmp_path)
    assert [i for i in range(ours.config.total_layers) if ours.config.experts_of(i)] == [1, 3, 5]
    monkeypatch.setattr(NllbMoeSparseMLP, "forward", mixture)
    sources, targets, labels = texts(SOURCES, 53), texts(TARGETS, 53, seed=2), texts(TARGETS, 53, seed=3)
    stream, attend = inputs(sources, targets)
    expected = logits(model, sources, targets)
    assert_same(ours(stream, attend, Rows()), expected.detach(), 1e-6, "logits")
    same_loss_and_gradients(ours, model, (stream, attend), expected, torch.cat(labels), tolerance=3e-6)


def test_transformers_runs_two_experts_only() -> None:
    """Says when transformers comes to agree: compare with its own forward pass then, without the oracle."""
    model = theirs()
    source, target = texts([31], 53), texts([12], 53, seed=2)
    with torch.no_grad():
        before = logits(model, source, target)
        for module in model.modules():
            if isinstance(module, NllbMoeSparseMLP):
                chosen, weights, _ = module.router(torch.randn(200, 24, dtype=torch.float64))
                assert (weights > 0).sum(0).min() > 0, "its router uses all experts"
                assert chosen.max() == 1
                for e in range(2, module.num_experts):
                    for p in module.experts[f"expert_{e}"].parameters():
                        p.zero_()
        assert torch.equal(logits(model, source, target), before), (
            "transformers now runs experts beyond the first two: compare test_logits_loss_and_gradients with its own "
            "forward pass, remove the oracle, and correct colonnade/checkpoint/hf/nllb.py and encoder-decoder.md"
        )


def test_experts_are_masked_in_training_and_scaled_otherwise() -> None:
    """With experts whose output is 1 the layer's is the sum of the weights that are left."""
    config = nllb()
    assert config.moe is not None
    layer = MixtureOfExperts(config, config.moe, SOLO_AXES, device=torch.device("cpu"), dtype=torch.float64)
    with torch.no_grad():
        for name, p in layer.named_parameters():
            p.copy_(torch.ones_like(p) if name == "experts.down_bias" else torch.randn_like(p) * (name[:6] == "router"))
    T = 4000
    x_TD, index_T = torch.randn(T, config.width, dtype=torch.float64), torch.arange(T)
    evaluated, _ = layer(x_TD, T, LayerRouting.at(0, index_T, None))
    assert_same(evaluated, torch.full_like(evaluated, 0.8), 1e-12, "evaluation")
    step = [Dropout.of(0, number, 1, index_T, DropoutRates()).at(0) for number in (0, 1)]
    routing = LayerRouting.at(0, index_T, Routing(index_T, weight=0.0))
    weights_T = layer(x_TD, T, routing, step[0])[0][:, 0]
    assert abs((weights_T == 0).double().mean() - 0.2**2) < 0.01
    assert abs((weights_T - 1 > -1e-9).double().mean() - 0.8**2) < 0.03
    assert abs(weights_T.mean() - 0.8) < 0.02
    assert torch.equal(layer(x_TD, T, routing, step[0])[0][:, 0], weights_T)
    assert not torch.equal(layer(x_TD, T, routing, step[1])[0][:, 0], weights_T)


def test_files_both_ways_bit_for_bit(tmp_path: Path) -> None:
    theirs().save_pretrained(tmp_path / "theirs")
    write_hf(load(tmp_path / "theirs"), tmp_path / "ours")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "ours"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert HFFolder(tmp_path / "ours").config == HFFolder(tmp_path / "theirs").config
    read = transformers.NllbMoeForConditionalGeneration.from_pretrained(tmp_path / "ours", dtype=torch.float64)
    named = dict(theirs().named_parameters())
    assert all(torch.equal(p, named[name]) for name, p in read.named_parameters())
