"""The programs that ``compress.py`` compares: ours, transformers, torchao and llama.cpp, each with one model from disk.

A :class:`Side` loads a folder or file and gives logits, its weights' bytes, and the speed of greedy decoding on one
thread.
"""

import subprocess
import sys
import time
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

import colonnade
from colonnade.config import Device, ServeConfig, WeightFormat
from colonnade.model.weight_only_quant import weight_bytes
from colonnade.serve.sampling_params import SamplingParams
from harness.engine_load import decode_rate
from harness.llama_cpp_peer import LlamaCpp, load_library, runner


class Side(Protocol):
    """A loaded model."""

    weight_bytes: int

    def logits(self, tokens: Tensor) -> Tensor:
        """(T, V) of tokens (T,)."""
        ...

    def first(self, prompt: list[int]) -> object:
        """Generate one token."""
        ...

    def rate(self, prompt: list[int], new: int) -> float:
        """Tokens after the first per second of CPU time."""
        ...


class Ours:
    """Colonnade: the model, and its engine."""

    def __init__(self, path: Path, device: Device = "cpu", weights: WeightFormat = "stored"):
        self.model = colonnade.load(path, device=device, dtype="float32", weights=weights)
        self.weight_bytes = weight_bytes(self.model.transformer)
        self._engine: colonnade.Engine | None = None

    def logits(self, tokens: Tensor) -> Tensor:
        """As the model's; once there is an engine, with its kernels."""
        return self.model.logits(tokens).cpu()

    def first(self, prompt: list[int]) -> object:
        """Make the engine, and generate one token."""
        # The context of 512 tokens in pages of 16.
        self._engine = colonnade.Engine(
            self.model, ServeConfig(max_requests=1, token_budget=256, page_tokens=16, pages=33)
        )
        self._engine.add(prompt, SamplingParams(max_tokens=1, temperature=0, ignore_eos=True))
        return self._engine.step()

    def rate(self, prompt: list[int], new: int) -> float:
        """Greedy, one request."""
        assert self._engine is not None
        self._engine.add(prompt, SamplingParams(max_tokens=new, temperature=0, ignore_eos=True))
        self._engine.step()
        return decode_rate(self._engine)


class Transformers:
    """transformers' model of a Hugging Face folder; with ``bits``, its blocks' layers quantised by torchao."""

    def __init__(self, path: Path, bits: int = 0):
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        if bits:
            from torchao.quantization import (  # type: ignore[import-not-found]
                Int8WeightOnlyConfig,
                IntxWeightOnlyConfig,
                quantize_,
            )
            from torchao.quantization.granularity import PerGroup  # type: ignore[import-not-found]

            config = IntxWeightOnlyConfig(torch.int4, PerGroup(64)) if bits == 4 else Int8WeightOnlyConfig()
            quantize_(self.model.model.layers, config)
        tensors = {id(x): x for x in (*self.model.parameters(), *self.model.buffers())}.values()
        self.weight_bytes = sum(map(_bytes, tensors))

    def logits(self, tokens: Tensor) -> Tensor:
        """Without a cache."""
        return self.model(tokens[None]).logits[0]

    def first(self, prompt: list[int]) -> object:
        """Generate one token."""
        return self._cpu_s(prompt, 1)

    def rate(self, prompt: list[int], new: int) -> float:
        """From the times of ``new`` tokens and of one."""
        return (new - 1) / (self._cpu_s(prompt, new) - self._cpu_s(prompt, 1))

    def _cpu_s(self, prompt: list[int], new: int) -> float:
        began, ids = time.process_time(), torch.tensor([prompt])
        options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}
        self.model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        return time.process_time() - began


def _bytes(x: Tensor) -> int:
    """Memory of a tensor, or of a tensor subclass's parts; int4 in int8 counts as it is held."""
    if hasattr(x, "__tensor_flatten__"):
        return sum(_bytes(getattr(x, name)) for name in x.__tensor_flatten__()[0])
    return x.nbytes


class Llama:
    """llama.cpp with a GGUF file; ``folder`` has the package llama_cpp."""

    def __init__(self, path: Path, folder: Path, context: int):
        self.library, self.path = load_library(folder), path
        self.weight_bytes = path.stat().st_size
        self.model = LlamaCpp(self.library, path, 1, context + 8)

    def logits(self, tokens: Tensor) -> Tensor:
        """In one batch."""
        self.model.clear()
        self.model.decode([(token, i, 0, True) for i, token in enumerate(tokens.tolist())])
        return torch.from_numpy(np.stack([self.model.logits(i) for i in range(len(tokens))]))

    def first(self, prompt: list[int]) -> object:
        """Generate one token."""
        self.model.clear()
        return self.model.prefill([prompt])[0]

    def rate(self, prompt: list[int], new: int) -> float:
        """Greedy by numpy's argmax."""
        took = runner(self.library, self.path, 1, len(prompt) + new + 8)([prompt], new)
        return (new - 1) / took.rest_s


def llama_quantise(folder: Path, source: Path, out: Path, file_type: int) -> None:
    """Write ``source``, quantised by llama.cpp, in a separate process: in this one, decoding would crash later."""
    code = (
        "import ctypes, sys; sys.path.append(sys.argv[1]); import llama_cpp as l; l.llama_backend_init();"
        "p = l.llama_model_quantize_default_params(); p.ftype, p.nthread = int(sys.argv[4]), 1;"
        "sys.exit(l.llama_model_quantize(sys.argv[2].encode(), sys.argv[3].encode(), ctypes.byref(p)))"
    )
    words = [sys.executable, "-c", code, str(folder), str(source), str(out), str(file_type)]
    subprocess.run(words, check=True, capture_output=True)
