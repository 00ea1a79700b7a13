"""RMSNorm and LayerNorm, in plain torch.

    rms     y = x / √(mean(x²) + ε) · w               Zhang & Sennrich 2019, arXiv 1910.07467
    layer   y = (x − mean) / √(var + ε) · w + b       Ba 2016, arXiv 1607.06450

Means are over the last dimension.
"""

from torch import Tensor
from torch.nn import functional as F


def norm(x: Tensor, weight_D: Tensor, bias_D: Tensor | None, eps: float) -> Tensor:
    """Normalises rows of ``x`` (…, D): LayerNorm if there is a bias, otherwise RMSNorm; means are in at least
    float32.
    """
    if bias_D is None:
        return F.rms_norm(x, weight_D.shape, weight_D, eps)
    return F.layer_norm(x, weight_D.shape, weight_D, bias_D, eps)
