"""Post-training compression: calibration, GPTQ, folding of activation scales."""

from colonnade.compress.compress import Compression, compress

__all__ = ["Compression", "compress"]
