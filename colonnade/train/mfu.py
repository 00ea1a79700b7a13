"""Model FLOPs utilisation (MFU), and peak FLOP/s of known accelerators.

    model FLOP/s = tokens/s · FLOPs per token (:meth:`ModelConfig.flops_per_token`)
    MFU          = model FLOP/s per rank / peak FLOP/s of its accelerator     (PaLM, arXiv 2204.02311, appendix B)

The peaks are the vendors' dense rates (no structured sparsity) with 32-bit accumulation, from their data sheets. An
accelerator that is not in the table has no MFU: a guessed peak would give a number that looks measured.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from colonnade.config import ModelConfig

ComputeType = Literal["float32", "bfloat16", "float16", "float64"]


@dataclass(frozen=True)
class Accelerator:
    """Dense peaks of one accelerator [FLOP/s]; ``float32`` is without TF32, which nothing here switches on."""

    match: str
    """Part of its name in the driver."""
    bfloat16: float
    float32: float
    float64: float

    def peak(self, dtype: ComputeType) -> float:
        """FLOP/s of GEMMs with operands of ``dtype`` (float16 is as fast as bfloat16 on all of them)."""
        return self.bfloat16 if dtype == "float16" else getattr(self, dtype)


# The first match wins, so the longer of two names with a common prefix comes first.
ACCELERATORS = (
    Accelerator("GB200", 2500e12, 80e12, 40e12),
    Accelerator("B200", 2250e12, 75e12, 37e12),
    Accelerator("GH200", 989e12, 67e12, 67e12),
    Accelerator("H200", 989e12, 67e12, 67e12),
    Accelerator("H100 NVL", 835e12, 60e12, 60e12),
    Accelerator("H100 PCIe", 756e12, 51e12, 51e12),
    Accelerator("H100", 989e12, 67e12, 67e12),
    Accelerator("A100", 312e12, 19.5e12, 19.5e12),
    Accelerator("A40", 149.7e12, 37.4e12, 0.58e12),
    Accelerator("L40S", 362e12, 91.6e12, 1.4e12),
    Accelerator("L4", 121e12, 30.3e12, 0.47e12),
    Accelerator("RTX 4090", 165.2e12, 82.6e12, 1.3e12),
    Accelerator("RTX 3090", 71e12, 35.6e12, 0.56e12),
    Accelerator("MI300X", 1307.4e12, 163.4e12, 163.4e12),
)  # fmt: skip


def accelerator_named(name: str) -> Accelerator | None:
    """The accelerator that a driver calls ``name``; None for one not in the table (and for any CPU)."""
    upper = name.upper()
    return next((known for known in ACCELERATORS if known.match.upper() in upper), None)


def find_accelerator(device: torch.device) -> Accelerator | None:
    """The accelerator of ``device``, if known."""
    return accelerator_named(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


@dataclass(frozen=True)
class Throughput:
    """Tokens/s, FLOP/s and MFU of a run, in the field's two conventions for causal attention."""

    tokens_per_s: float
    """Over all ranks."""
    tflops: float
    """Model TFLOP/s of one rank with all attention scores counted (Megatron, PaLM)."""
    tflops_causal: float
    """The same without the half of the scores that the causal mask removes."""
    mfu: float | None
    """``tflops`` / the accelerator's peak; None when it is unknown."""
    mfu_causal: float | None
    """``tflops_causal`` / the accelerator's peak."""

    def __str__(self) -> str:
        rate = f"{self.tokens_per_s:,.0f} tokens/s"
        flops = f"{self.tflops:.3g} TFLOP/s ({self.tflops_causal:.3g} causal)"
        if self.mfu is None or self.mfu_causal is None:
            return f"{rate}  {flops}  mfu n/a"
        return f"{rate}  {flops}  mfu {self.mfu:.1%} ({self.mfu_causal:.1%} causal)"


def throughput(
    model: ModelConfig,
    *,
    sequence: int,
    tokens_per_s: float,
    ranks: int,
    accelerator: Accelerator | None,
    dtype: ComputeType,
) -> Throughput:
    """Throughput of a run that trains ``tokens_per_s`` over ``ranks`` ranks on samples of ``sequence`` tokens.

    Attention is counted at the full sample length, even where documents are separated and less is computed.
    """
    full, causal = (
        tokens_per_s * model.flops_per_token(sequence, causal=half) / ranks / 1e12 for half in (False, True)
    )
    peak = None if accelerator is None else accelerator.peak(dtype)
    return Throughput(tokens_per_s, full, causal, peak and full * 1e12 / peak, peak and causal * 1e12 / peak)
