"""Reads a Hugging Face folder (config.json and safetensors, in one file or in shards) under any layout.

Each rank opens the files and reads its own slices (``get_slice(name)[a:b]``): of a tensor that is sharded over tp, the
other ranks' part is never read. Pickled ``.bin`` files are refused: unpickling runs code from the file.
"""

import re
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from colonnade.checkpoint.atomic_folder import read_json
from colonnade.checkpoint.hf import FAMILIES, config_from_hf
from colonnade.checkpoint.hf.family import Family
from colonnade.checkpoint.hf.quantised_source import QuantisedSource, parse_quantization
from colonnade.checkpoint.weight_loader import WeightLoader, tensors_equal
from colonnade.checkpoint.weight_mapping import Box, Shape
from colonnade.config import ModelConfig
from colonnade.errors import CheckpointError
from colonnade.model import Transformer
from colonnade.model.weight_only_quant import Formats, StoreWeight, copy_weight

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
FLOATS = ("F64", "F32", "F16", "BF16")
"""The dtypes of safetensors that can be read."""


class HFFolder:
    """A Hugging Face folder: reads :attr:`config` and tensor shapes immediately, values in :meth:`load_weights`.

    Raises :class:`CheckpointError` for a folder that is incomplete, damaged or of an unknown family.
    """

    def __init__(self, path: Path | str):
        self.path = Path(path)
        file = self.path / CONFIG
        if not file.is_file():
            raise CheckpointError(f"{file} is missing; every Hugging Face model has one")
        raw = dict(read_json(file))
        quantised = raw.pop("quantization_config", None) or raw.pop("compression_config", None)
        config = config_from_hf(raw, str(file))
        family = FAMILIES[config.family]
        source: SafetensorsSource | QuantisedSource = SafetensorsSource(self.path, family)
        if quantised is not None:
            source = QuantisedSource(source, parse_quantization(quantised, str(file)))  # pyrefly: ignore[bad-argument-type]
        self.config: ModelConfig = family.config_for_tensors(config, source.shapes)
        head, embedding = (family.table[name].names[0] for name in ("unembed.weight", "embed.tokens.weight"))
        if family.tied_by_values:
            own = head in source.shapes and not tensors_equal(source, head, embedding)
            self.config = self.config.replace(tied=not own)
        duplicates = {**family.duplicates, head: embedding} if self.config.tied else family.duplicates
        self._weights = WeightLoader(self.config, source, family.table_for(source.shapes), duplicates)

    def load_weights(self, model: Transformer, place: StoreWeight = copy_weight) -> None:
        """Reads this rank's share into ``model``, built from :attr:`config`; see :meth:`WeightLoader.load_weights`."""
        self._weights.load_weights(model, place)

    @property
    def formats(self) -> Formats:
        """The formats of its quantised matrices."""
        return self._weights.formats


class SafetensorsSource:
    """The tensors of one folder by the family's full names, without its buffers."""

    def __init__(self, folder: Path, family: Family):
        self.folder = folder
        self._files = {name: folder / file for name, file in _weight_map(folder).items()}
        self._open = {file: _open(file) for file in sorted(set(self._files.values()))}
        self._check_index()
        # A file saved from the base model (the original GPT-2's, for one) lacks the prefix everywhere.
        base_only = not any(name.startswith(family.prefix) for name in self._files)
        self._name_in_file: dict[str, str] = {}
        for name in self._files:
            full = family.prefix + name if base_only and not name.startswith("lm_head.") else name
            for old, new in family.renamed_suffixes:
                full = full.removesuffix(old) + new if full.endswith(old) else full
            if not re.fullmatch(family.buffers, full):
                self._name_in_file[full] = name
        self.shapes: dict[str, Shape] = {name: tuple(self._slice(name).get_shape()) for name in self._name_in_file}

    def read(self, name: str, box: Box) -> Tensor:
        """Reads one box of one tensor, in its dtype on disk."""
        tensor = self._slice(name)
        if tensor.get_dtype() not in FLOATS:
            raise CheckpointError(
                f"{self.file_of(name)} contains {name!r} as {tensor.get_dtype()}, but only {', '.join(FLOATS)} can be "
                "read; use the original, unquantised checkpoint"
            )
        try:
            return tensor[tuple(slice(start, stop) for start, stop in box)]
        except (SafetensorError, OSError) as why:
            raise CheckpointError(f"{self.file_of(name)}: cannot read {name!r}: {why}; download it again") from None

    def raw_dtype(self, name: str) -> str:
        """The dtype of a tensor, as safetensors calls it."""
        return str(self._slice(name).get_dtype())

    def read_raw(self, name: str, box: Box) -> Tensor:
        """Reads one box of a tensor of any dtype."""
        try:
            tensor = self._slice(name)
            return tensor[tuple(slice(start, stop) for start, stop in box)] if box else tensor[...]
        except (SafetensorError, OSError) as why:
            raise CheckpointError(f"{self.file_of(name)}: cannot read {name!r}: {why}; download it again") from None

    def file_of(self, name: str) -> str:
        """The file that contains, or should contain, ``name``."""
        if name in self._name_in_file:
            return str(self._files[self._name_in_file[name]])
        return str(next(iter(self._open)) if len(self._open) == 1 else self.folder / INDEX)

    def _slice(self, name: str) -> Any:
        name_in_file = self._name_in_file[name]
        return self._open[self._files[name_in_file]].get_slice(name_in_file)

    def _check_index(self) -> None:
        """Raises unless the index and the shards list the same tensors."""
        for file, handle in self._open.items():
            listed, stored = {name for name, of in self._files.items() if of == file}, set(handle.keys())
            if differ := sorted(listed ^ stored):
                verb = "lacks" if differ[0] in listed else "contains"
                raise CheckpointError(
                    f"{file} {verb} the tensor {differ[0]!r}, but {INDEX} says otherwise; download the folder again"
                )


def _weight_map(folder: Path) -> dict[str, str]:
    """Tensor name to file name, from the single file's header or from the index."""
    if (folder / WEIGHTS).is_file():
        return dict.fromkeys(_open(folder / WEIGHTS).keys(), WEIGHTS)
    if (folder / INDEX).is_file():
        weight_map = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{folder / INDEX} has no 'weight_map'; download it again")
        files = {str(name): str(file) for name, file in weight_map.items()}
        for file in sorted(set(files.values())):
            # A name with a directory in it would read files outside the folder.
            if Path(file).name != file or not file.endswith(".safetensors"):
                raise CheckpointError(
                    f"{folder / INDEX} lists {file!r}, which is not a safetensors file of this folder"
                )
            if not (folder / file).is_file():
                raise CheckpointError(f"{folder / file} is missing, but {INDEX} lists it; download it again")
        return files
    if pickles := sorted([*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")]):
        raise CheckpointError(
            f"{pickles[0]} is a pickle, which can run code when it is opened; if you trust it, convert it with "
            "transformers: AutoModelForCausalLM.from_pretrained(OLD).save_pretrained(NEW)"
        )
    raise CheckpointError(f"{folder} has neither {WEIGHTS} nor {INDEX}; complete the download")


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as why:
        raise CheckpointError(f"{file} is damaged or truncated ({why}); download it again") from None
