"""A model on disk, whatever wrote it: where a name leads, and its weights, opened and not yet read.

A name is a Colonnade checkpoint (or a run folder: its newest one), a Hugging Face folder, a GGUF file, a hub id, or one
of the packages that carry weights.
"""

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from colonnade.checkpoint import atomic_folder as folders
from colonnade.checkpoint import native
from colonnade.checkpoint.atomic_folder import Manifest
from colonnade.checkpoint.gguf import GGUFFile, find_smollm2
from colonnade.checkpoint.hf.read import HFFolder, fetch, find_minilm
from colonnade.config import ModelConfig
from colonnade.errors import CheckpointError
from colonnade.model import Transformer
from colonnade.model.weight_only_quant import Place
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.parallel.fsdp import Masters

PACKAGED = {"smollm2": find_smollm2, "minilm": find_minilm}
"""Real weights that travel as Python packages, by the names that they are known by."""
SAID = ["smollm2", "minilm (an encoder)"]
"""The same in messages."""


@dataclass(frozen=True)
class OpenedModel:
    """A model on disk that was opened and not loaded."""

    place: Path
    """Its folder or file."""
    config: ModelConfig
    """What it is."""
    fill: Callable[[Transformer, DistributedContext, Place], object]
    """Reads a rank's share of the weights, under any layout, before FSDP cuts them."""
    into: Callable[[Transformer, DistributedContext, Masters], object]
    """Reads this rank's part of the weights into the masters of a model in training."""
    words: Path | Callable[[], tuple[Any, ...]]
    """Where its tokenizer lies, or what reads the parts of one."""
    tasks: tuple[str, ...] = ()
    """The names of the tasks that its router knows, where the checkpoint has them."""


def open_model(path: str | Path) -> OpenedModel:
    """The model that ``path`` means; raises :class:`CheckpointError` for anything missing, damaged or unknown."""
    place = locate(path)
    if native.is_native(place):
        meta = native.read_meta(place)
        config = meta.model

        def fill(model: Transformer, context: DistributedContext, put: Place) -> object:
            return native.load(place, model, context, trained=config, place=put)

        def into(model: Transformer, context: DistributedContext, held: Masters) -> object:
            return native.load(place, model, context, trained=config, masters=held)

        return OpenedModel(place, config, fill, into, place / native.TOKENIZER, meta.tasks)
    theirs: HFFolder | GGUFFile = HFFolder(place) if place.is_dir() else GGUFFile(place)

    def placed(model: Transformer, _: DistributedContext, held: Masters) -> None:
        theirs.fill(model, held.assign)
        held.update_model()

    words = place if isinstance(theirs, HFFolder) else theirs.tokenizer
    return OpenedModel(place, theirs.config, lambda model, _, put: theirs.fill(model, put), placed, words)


def locate(path: str | Path, *, weights: bool = True) -> Path:
    """The folder or file that ``path`` means: itself, a run's newest checkpoint, a package's file, or a download, if
    need be without the ``weights``.

    Raises :class:`CheckpointError` when there is nothing of that name.
    """
    place = Path(path)
    if str(path) in PACKAGED and not place.exists():
        return PACKAGED[str(path)]()
    if place.is_file():
        return place
    if place.is_dir():
        if _is_model(place):
            return place
        newest = native.newest(place)
        if newest is None:
            for _, damaged in folders.steps(place)[:1]:
                Manifest.read(damaged).check_sizes(damaged)  # says which file it is
            raise CheckpointError(
                f"{place} holds neither a Colonnade checkpoint, nor a run, nor a Hugging Face model; "
                "give runs/NAME, runs/NAME/step-N, or a folder with config.json and safetensors"
                + _models_near(place / "step")
            )
        return newest
    near = _models_near(place)
    if re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)) and not str(path).startswith("."):
        try:
            return fetch(str(path), weights=weights)
        except CheckpointError as error:
            if not place.parent.is_dir():
                raise CheckpointError(f"{error}{near}") from None
    known = f"; give a folder, a GGUF file, a hub id (owner/name), or {' or '.join(SAID)}"
    raise CheckpointError(f"{place} does not exist{near or known}")


def _models_near(place: Path) -> str:
    """``"; here are runs/a, runs/b"``: some models in the folder of a path that is not there, or in ``runs``."""
    there = {path for folder in (place.parent, Path("runs")) for path in folder.glob("*") if path.is_dir()}
    models = sorted(str(path) for path in there if native.newest(path) or _is_model(path))
    packaged = SAID if difflib.get_close_matches(str(place), PACKAGED) else []
    likely = packaged + difflib.get_close_matches(str(place), models, 5, cutoff=0)
    return f"; here {'is' if len(likely) == 1 else 'are'} {', '.join(likely)}" if likely else ""


def _is_model(folder: Path) -> bool:
    return native.is_native(folder) or (folder / "config.json").is_file()
