"""The heads of a pooling engine: one row for each text, from the hidden states of all its tokens.

    embed      mean, first or last hidden state x_D of the text;  x / |x| if the model normalises
    classify   softmax, sigmoid or identity of the class head's logits

(Reimers 2019, arXiv 1908.10084, section 3.) Rows are in float32 or, for a float64 model, in float64.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from colonnade.config.serve import ClassActivation
from colonnade.model import Classes
from colonnade.model.contrastive import Embeddings
from colonnade.model.output_heads import Head, OutputProjection
from colonnade.serve.pooler_spec import PoolerSpec


@dataclass(frozen=True)
class Probabilities:
    """A classifier's probabilities of R packed texts that start at ``cu_seqlens``."""

    cu_seqlens: Tensor
    activation: ClassActivation

    def __call__(self, x_tD: Tensor, T: int, output: OutputProjection) -> Tensor:
        """p_RC; the logits, if the activation is identity."""
        logits_RC: Any = Classes(self.cu_seqlens[:-1].long())(x_tD, T, output)
        logits_RC = logits_RC.to(torch.promote_types(logits_RC.dtype, torch.float32))
        if self.activation == "identity":
            return logits_RC
        return logits_RC.softmax(1) if self.activation == "softmax" else logits_RC.sigmoid()


def head_of(spec: PoolerSpec, cu_seqlens: Tensor) -> Head:
    """The head for texts that start at ``cu_seqlens``."""
    if spec.task == "embed":
        return Embeddings(cu_seqlens, spec.pooling, spec.normalize)
    return Probabilities(cu_seqlens, spec.activation)
