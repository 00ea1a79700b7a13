"""Word times from the cross attention of some heads, by dynamic time warping.

    w_hij   = softmax over frames j of head h's scores for token i, over the alignment heads
    z_hij   = (w − mean over tokens) / deviation over tokens, median over 7 frames
    path    = the cheapest monotone path through −mean_h z from (first token, first frame) to (last, last)

A token begins where the path first reaches it (Whisper, arXiv 2212.04356; the method is that of the authors' code, and
their heads are in the model's files). Without such a list, all heads of the second half of the layers are used. Words
are separated by spaces; in languages without spaces each character is a word.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from colonnade.data.tokenizer import Tokenizer
from colonnade.model import PagedMemory
from colonnade.model.cross_attention import LayerMemory

MEDIAN = 7
"""Width of the median filter [frames]."""
FRAME_S = 0.02
WITHOUT_SPACES = frozenset({"zh", "ja", "th", "lo", "my", "yue"})
"""Languages that are written without spaces between words."""


class Word(NamedTuple):
    """One word with its time."""

    text: str
    start_s: float
    end_s: float
    probability: float
    """The mean probability of its tokens."""


@dataclass(frozen=True)
class RecordingMemory:
    """A cross-attention memory that records the attention weights of some ``heads``, by layer."""

    memory: PagedMemory
    heads: Mapping[int, Sequence[int]]
    pages: Tensor
    """int64 pages of the source."""
    frames: int
    """Number of keys to attend to, from the beginning."""
    weights: list[Tensor] = field(default_factory=list)
    """float32 (tokens, frames) of each head, in the order of layers."""

    def write(self, kv_SkL2H: Tensor) -> "RecordingMemory":
        """The memory with the keys and values of new sources."""
        return replace(self, memory=self.memory.write(kv_SkL2H))

    def at(self, layer: int) -> LayerMemory:
        """The memory of one decoder layer."""
        memory, heads = self.memory.at(layer), self.heads.get(layer, ())

        def attend(q_TnH: Tensor) -> Tensor:
            group = q_TnH.shape[1] // memory.pools.k_PpKH.shape[2]
            for head in heads:
                k_SH = memory.pools.k_PpKH[self.pages, :, head // group].flatten(0, 1)[: self.frames]
                scores_TS = q_TnH[:, head].float() @ k_SH.float().T * q_TnH.shape[2] ** -0.5
                self.weights.append(scores_TS.softmax(-1))
            return memory(q_TnH)

        return attend


def alignment_heads(listed: Sequence[Sequence[int]] | None, layers: int, heads: int) -> dict[int, list[int]]:
    """The heads by layer: those ``listed`` as (layer, head), or all of the second half of the layers."""
    chosen: dict[int, list[int]] = {}
    for layer, head in listed or [(i, n) for i in range(layers // 2, layers) for n in range(heads)]:
        chosen.setdefault(layer, []).append(head)
    return chosen


def token_starts(weights_NTS: Tensor) -> list[int]:
    """The first frame of each of T tokens, from the attention weights of N heads."""
    deviation_N1S, mean_N1S = torch.std_mean(weights_NTS, dim=1, keepdim=True, unbiased=False)
    # A frame to which all tokens attend equally has no information about their times.
    z_NTS = (weights_NTS - mean_N1S) / deviation_N1S.clamp(min=1e-12)
    tokens, frames = dtw_path(-median_filter(z_NTS).mean(0).double().numpy())
    first = np.concatenate([[True], np.diff(tokens) > 0])
    return frames[first].tolist()


def median_filter(x: Tensor) -> Tensor:
    """The median of :data:`MEDIAN` neighbours of each frame, mirrored at the ends; fewer than 4 stay as they are."""
    reach = min(MEDIAN // 2, x.shape[-1] - 1)
    if reach < MEDIAN // 2:
        return x
    mirrored = torch.nn.functional.pad(x, (reach, reach), mode="reflect")
    return mirrored.unfold(-1, MEDIAN, 1).median(-1).values


def dtw_path(cost_TS: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(rows, columns) of the cheapest path from the first to the last cell, each step advancing one or both by 1.

    Computed by anti-diagonals. Among moves of equal cost, advancing the column comes first, as in the authors' code.
    """
    T, S = cost_TS.shape
    total = np.full((T + 1, S + 1), np.inf)
    total[0, 0] = 0.0
    move = np.full((T + 1, S + 1), 2, np.int8)  # 0: both, 1: a row, 2: a column
    for diagonal in range(2, T + S + 1):
        i = np.arange(max(1, diagonal - S), min(T, diagonal - 1) + 1)
        j = diagonal - i
        both, row, column = total[i - 1, j - 1], total[i - 1, j], total[i, j - 1]
        step = np.where((both < row) & (both < column), 0, np.where((row < both) & (row < column), 1, 2))
        move[i, j] = step
        total[i, j] = cost_TS[i - 1, j - 1] + np.choose(step, (both, row, column))
    i, j, path = T, S, list[tuple[int, int]]()
    move[0, :], move[:, 0] = 2, 1
    while i > 0 or j > 0:
        path.append((i - 1, j - 1))
        step = move[i, j]
        i, j = i - (step != 2), j - (step != 1)
    rows, columns = np.array(path[::-1]).T
    return rows, columns


def split_words(tokens: Sequence[int], tokenizer: Tokenizer, language: str) -> list[list[int]]:
    """``tokens`` by words; a character of several tokens is never divided."""
    characters: list[list[int]] = []
    begun: list[int] = []
    for token in tokens:
        begun.append(token)
        if "\ufffd" not in tokenizer.decode(begun):
            characters.append(begun)
            begun = []
    if begun:
        characters.append(begun)
    if language in WITHOUT_SPACES:
        return characters
    words: list[list[int]] = []
    for part in characters:
        text = tokenizer.decode(part)
        if words and not text.startswith(" "):
            words[-1] += part
        else:
            words.append(list(part))
    return words
