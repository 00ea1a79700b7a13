"""2:4 sparsity (SparseGPT, Frantar 2023, arXiv 2301.00774): two of every four consecutive inputs of a row keep a
weight.

    every four columns: keep the two of the highest w² / U_jj²;  δ = (w_j − ŵ_j) / U_jj,  W_{:,j:} −= δ U_{j,j:}

U is GPTQ's (:mod:`colonnade.compress.gptq`), and columns are visited in order, because four form one choice. Of this
result and those of masks by w² h and by w² without corrections, the one with the least error tr(Δ H Δᵀ) is kept. The
result is an ordinary matrix with zeros: it loads anywhere, and tensor cores skip the zeros where a runtime packs it.
"""

import torch
from torch import Tensor

from colonnade.compress.gptq import correct_blocks, damped, error, inverse_factor
from colonnade.kernels.linear.gptq_columns import GROUP, Rounding, best_two
from colonnade.kernels.registry import choose


def is_sparse24(w_FD: Tensor) -> bool:
    """Whether at most two of each four inputs have a weight."""
    return w_FD.shape[1] % GROUP == 0 and bool(((w_FD.unflatten(1, (-1, GROUP)) != 0).sum(2) <= GROUP // 2).all())


def by_size(w_FD: Tensor) -> Tensor:
    """``w_FD`` with the two largest of each four inputs, and zeros."""
    return w_FD * best_two(w_FD.abs())


def sparsegpt(w_FD: Tensor, hessian_DD: Tensor) -> Tensor:
    """``w_FD``, float32, with zeros; raises :class:`~colonnade.errors.DataError` for an H that is not finite."""
    h_DD, w_FD = damped(hessian_DD), w_FD.float()
    round_columns = choose("gptq_columns", w_FD.device.type, torch.float32)
    corrected = correct_blocks(w_FD, inverse_factor(h_DD), lambda w, u, _: round_columns(w, u, Rounding("sparse24")))
    found = [corrected, w_FD * best_two(w_FD.square() * h_DD.diagonal().float()), by_size(w_FD)]
    return min(found, key=lambda w: error(w - w_FD, h_DD))
