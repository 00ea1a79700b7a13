"""Hugging Face folders, read and written in any layout; one name map a family."""

from colonnade.checkpoint.hf.families import FAMILIES, config_from_hf, config_to_hf
from colonnade.checkpoint.hf.read import HFFolder, fetch
from colonnade.checkpoint.hf.write import write_hf

__all__ = ["FAMILIES", "HFFolder", "config_from_hf", "config_to_hf", "fetch", "write_hf"]
