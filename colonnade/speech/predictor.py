"""The transducer's predictor, p_u of the labels so far: one LSTM stack, or a function of the last two labels.

Both have two forms that give the same numbers: :meth:`forward` over whole label sequences, for the loss, and
:meth:`step`, one label of many streams, for search. The blank starts a sequence. An LSTM remembers all labels (Graves,
arXiv 1211.3711); two labels cost little and lose little accuracy (Ghodsi et al., 2020).
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

States = tuple[Tensor, ...]
"""A predictor's state for R streams: tensors whose rows are streams."""


class Predictor(Protocol):
    """One step for R streams."""

    def start(self, R: int) -> States:
        """The state before the first label."""
        ...

    def step(self, label_R: Tensor, states: States) -> tuple[Tensor, States]:
        """(p_RD, the new state) after these labels; the first label is the blank."""
        ...


class StatelessPredictor(nn.Module):
    """p_u = W relu(E₀[y_u] + E₁[y_{u−1}])."""

    def __init__(self, width: int, vocab_size: int, out_width: int, blank: int = 0):
        super().__init__()
        self.blank = blank
        self.last, self.previous = nn.Embedding(vocab_size, width), nn.Embedding(vocab_size, width)
        self.out = nn.Linear(width, out_width, bias=False)

    def forward(self, labels: Sequence[Sequence[int]]) -> Tensor:
        """p_UD of all prefixes, one utterance after another: len + 1 rows each."""
        pairs = [
            pair for own in labels for pair in zip([self.blank, *own], [self.blank, self.blank, *own], strict=False)
        ]
        pairs_U2 = torch.tensor(pairs, device=self.out.weight.device).view(-1, 2)
        return self._output(pairs_U2[:, 0], pairs_U2[:, 1])

    def start(self, R: int) -> States:
        """The state before the first label."""
        return (torch.full((R,), self.blank, device=self.out.weight.device),)

    def step(self, label_R: Tensor, states: States) -> tuple[Tensor, States]:
        """(p_RD, the last labels)."""
        return self._output(label_R, states[0]), (label_R,)

    def _output(self, last_R: Tensor, previous_R: Tensor) -> Tensor:
        return self.out(torch.relu(self.last(last_R) + self.previous(previous_R)))


class LstmPredictor(nn.Module):
    """Embedding, LayerNorm, layers of LSTM with a LayerNorm each, projection; ``norm`` False: without LayerNorm."""

    def __init__(self, width: int, vocab_size: int, out_width: int, layers: int = 3, blank: int = 0, norm: bool = True):
        super().__init__()
        self.blank, self.width = blank, width
        self.embed, self.norm = nn.Embedding(vocab_size, width), nn.LayerNorm(width) if norm else nn.Identity()
        self.layers = nn.ModuleList(nn.LSTM(width, width, batch_first=True) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) if norm else nn.Identity() for _ in range(layers))
        self.out = nn.Linear(width, out_width)

    def forward(self, labels: Sequence[Sequence[int]]) -> Tensor:
        """p_UD of all prefixes, one utterance after another: len + 1 rows each."""
        device = self.out.weight.device
        if not labels:
            return self.out.weight.new_zeros(0, self.out.out_features)
        rows = [torch.tensor([self.blank, *own], device=device) for own in labels]
        label_BU = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=self.blank)
        x_BUD = self.norm(self.embed(label_BU))
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x_BUD = norm(layer(x_BUD)[0])
        return torch.cat([p_UD[: len(own)] for p_UD, own in zip(self.out(x_BUD), rows, strict=True)])

    def start(self, R: int) -> States:
        """Zeros: hidden and cell state, all layers side by side."""
        zeros = self.out.weight.new_zeros(R, len(self.layers) * self.width)
        return zeros, zeros

    def step(self, label_R: Tensor, states: States) -> tuple[Tensor, States]:
        """(p_RD, the new state). On a CPU ``nn.LSTM`` lays out its weights again in each call, which takes longer than
        the step.
        """
        x_RD = self.norm(self.embed(label_R))
        hidden, cell = [], []
        for layer, norm, h_RD, c_RD in zip(
            self.layers, self.norms, *(x.split(self.width, 1) for x in states), strict=True
        ):
            new_h_RD, new_c_RD = torch.lstm_cell(x_RD, (h_RD, c_RD), *layer.all_weights[0])
            x_RD = norm(new_h_RD)
            hidden.append(new_h_RD)
            cell.append(new_c_RD)
        return self.out(x_RD), (torch.cat(hidden, 1), torch.cat(cell, 1))
