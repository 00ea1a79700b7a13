"""Hugging Face folders, read and written under any layout; one table of parameter names a family."""

from colonnade.checkpoint.hf.families import FAMILIES, config_from_hf, config_to_hf
from colonnade.checkpoint.hf.read import HFFolder
from colonnade.checkpoint.hf.write import write_hf

__all__ = ["FAMILIES", "HFFolder", "config_from_hf", "config_to_hf", "write_hf"]
