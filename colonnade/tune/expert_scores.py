"""Scores each expert's contribution on calibration text, for pruning.

load     choices of the expert                                                                        (int64)
gate     the mean router weight of its tokens
reap     S_e = mean over its tokens of g_e ‖f_e(x)‖                       (REAP, arXiv 2510.13999, equation 9)
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from colonnade.errors import ConfigError, DataError
from colonnade.kernels.experts.reference import ACTIVATIONS
from colonnade.model import Transformer
from colonnade.model.moe.experts import ExpertRows, Experts
from colonnade.tune.prune_experts import check_transformer, route


@dataclass(frozen=True)
class ExpertScores:
    """Scores by layer and expert, 0 in layers without experts."""

    load_LE: Tensor
    gate_LE: Tensor
    reap_LE: Tensor


@torch.no_grad()
def score_experts(model: Transformer, texts: Iterable[Tensor]) -> ExpertScores:
    """The scores of ``model``'s experts on ``texts``, int64 tokens (T,) each.

    Raises :class:`ConfigError` for a dense or quantised model, :class:`DataError` without text.
    """
    check_transformer(model)
    config, device = model.config, next(model.parameters()).device
    if config.moe is None:
        raise ConfigError("this model has no experts to score")
    sums = torch.zeros(3, config.layers, config.moe.experts, dtype=torch.float64, device=device)
    layers = [
        (int(name.split(".")[1]), module) for name, module in model.named_modules() if isinstance(module, Experts)
    ]
    if any(module.quantised for _, module in layers):
        raise ConfigError("quantised experts cannot be scored; load the model with weights='dense'")
    handles = [module.register_forward_pre_hook(_Hook(sums[:, layer])) for layer, module in layers]
    try:
        for text in texts:
            route(model, text)
    finally:
        for handle in handles:
            handle.remove()
    load_LE, gates_LE, norms_LE = sums
    if not load_LE.any():
        raise DataError("there was no text to score experts on; pass some text of the task")
    used_LE = load_LE.clamp(min=1)
    return ExpertScores(load_LE.long(), gates_LE / used_LE, norms_LE / used_LE)


@dataclass(frozen=True)
class _Hook:
    """Adds (choices, Σ g, Σ g ‖f(x)‖) of the experts of one layer."""

    sums_3E: Tensor

    def __call__(self, module: nn.Module, arguments: tuple[ExpertRows, ...]) -> None:
        assert isinstance(module, Experts)
        rows = arguments[0]
        order_R, ends_e = rows.order or module._sorted(rows, None)
        up, down, gate, up_b, gate_b, down_b = module.stored
        assert isinstance(up, Tensor)
        assert isinstance(down, Tensor)
        weights_TA = rows.weights_TA if rows.mask_TA is None else rows.weights_TA * rows.mask_TA
        x_RD, g_R = rows.x_TD[order_R // weights_TA.shape[1]], weights_TA.flatten()[order_R]
        act, start = ACTIVATIONS[module.activation], 0
        for e, end in enumerate(ends_e.tolist()):
            x_cD, g_c = x_RD[start:end], g_R[start:end].double()
            h_cf = x_cD @ up[e].T + (0 if up_b is None else up_b[e])
            if gate is None:
                h_cf = act(h_cf)
            else:
                assert isinstance(gate, Tensor)
                h_cf = act(x_cD @ gate[e].T + (0 if gate_b is None else gate_b[e])) * h_cf
            y_cD = h_cf @ down[e] + (0 if down_b is None else down_b[e])
            norm_c = y_cD.double().norm(dim=1)
            self.sums_3E[:, e] += torch.stack((torch.tensor(float(end - start)).to(g_c), g_c.sum(), g_c @ norm_c))
            start = end
