"""BERT's layers above its blocks: masked-token transform, pooler, and one small layer for each task.

    masked tokens   logits = W_embed norm(act(W x + b)) + b_vocab
    pooled          p = tanh(W x_first + b)                  x_first: the sequence's first token, [CLS]
    order, classes  logits = W p + b                         sentence order: in order, swapped
    spans           logits = W x + b                         (start, end) of an answer, for every token

(Devlin 2019, arXiv 1810.04805; sentence-order prediction: Lan 2020, arXiv 1909.11942, section 3.1.) Only the vocabulary
bias is cut over tp, like the embedding's rows. The other layers see few tokens or have few outputs: every rank computes
them whole, so their gradients are whole too. :attr:`ModelConfig.top` says which of them a model has; the head of the
forward pass says which of them it uses (:mod:`colonnade.model.encoder_heads`).
"""

import torch
from torch import Tensor, nn

from colonnade.config import ModelConfig
from colonnade.kernels.experts.reference import ACTIVATIONS
from colonnade.model.linear import Linear
from colonnade.model.norm import Norm
from colonnade.parallel.axis import Axes
from colonnade.parallel.layout import WHOLE, Placement


class BertLayers(nn.Module):
    """The layers that ``config.top`` names."""

    def __init__(self, config: ModelConfig, axes: Axes, *, device: torch.device, dtype: torch.dtype):
        super().__init__()
        self.act = ACTIVATIONS[config.activation]
        self.layout: dict[str, Placement] = {}

        def dense(name: str, wanted: bool, outputs: int) -> Linear | None:
            if not wanted:
                return None
            self.layout |= {f"{name}.weight": WHOLE, f"{name}.bias": WHOLE}
            return Linear(config.width, outputs, bias=True, device=device, dtype=dtype)

        self.transform = dense("transform", config.has_transform, config.width)
        self.norm = self.bias = None
        if config.has_transform:
            start, stop = axes.tp.part(config.vocab_size)
            self.norm = Norm(config, config.width, device=device, dtype=dtype)
            self.bias = nn.Parameter(torch.empty(stop - start, device=device, dtype=dtype))
            self.layout["bias"] = 0
        self.pooler = dense("pooler", config.has_pooler, config.width)
        self.order = dense("order", config.top == "pretraining", 2)
        self.classes = dense("classes", config.top == "classes", config.classes)
        self.spans = dense("spans", config.top == "spans", 2)

    def transform_masked(self, x_RD: Tensor) -> Tensor:
        """The input of the vocabulary projection."""
        assert self.transform is not None, "this top predicts no masked tokens"
        assert self.norm is not None
        return self.norm(self.act(self.transform(x_RD)))

    def pooled(self, x_RD: Tensor) -> Tensor:
        """p_RD of the sequences with first tokens ``x_RD``."""
        assert self.pooler is not None, "this top has no pooler"
        return torch.tanh(self.pooler(x_RD))
