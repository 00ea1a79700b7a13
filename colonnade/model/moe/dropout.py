"""Expert dropout: hidden units of the experts are dropped, at a rate of their own (Switch, arXiv 2101.03961, sec. 2.4).

An element is a token's j-th choice and a hidden unit's number among all of its expert's. What the choice brings along
is one int32, which travels with the row; the rest every rank knows of its own share of the hidden units. So whoever
computes a unit drops the same ones, at every degree, in the order of any exchange and when the pass runs again.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from colonnade.kernels.dropout.reference import Hidden, choices, hidden_units
from colonnade.model.noise import PlaceNoise
from colonnade.parallel.axis import Grid


@dataclass(frozen=True)
class ExpertDropout:
    """What is dropped within the experts that some tokens chose."""

    row_TA: Tensor
    """int32: what each choice brings along."""
    rate: float

    @staticmethod
    def of(noise: PlaceNoise | None, active: int) -> "ExpertDropout | None":
        """For the ``active`` choices of each token of ``noise``; None where nothing is dropped."""
        if noise is None or not noise.rates.expert:
            return None
        return ExpertDropout(choices(noise.key, noise.index_T, active), noise.rates.expert)

    def split(self, tokens: list[int]) -> "list[ExpertDropout]":
        """The same for so many tokens after one another."""
        return [replace(self, row_TA=part) for part in self.row_TA.split(tokens)]

    def tags(self, order_R: Tensor) -> Tensor:
        """int32 (R,): what the rows of these choices (t·A + j) bring along."""
        return self.row_TA.flatten()[order_R]

    def hidden(self, tag_R: Tensor, width: int, grid: Grid, degree: int = 1) -> Hidden:
        """Of rows with these tags, in experts of ``width`` hidden units, for the rank's slice at this degree (1: all).

        A slice is what the sh ranks that are equal modulo the degree hold, one after another.
        """
        holders = range(grid.sh.rank % degree, grid.sh.size, degree)
        shares = [grid.sh.part(width, rank) for rank in holders]
        unit_F = torch.cat([torch.arange(start, stop, device=tag_R.device) for start, stop in shares])
        return Hidden(tag_R, hidden_units(unit_F), self.rate)
