"""The native checkpoint: one folder that any plan can load, weights and optimizer.

    manifest.json               size and SHA-256 of every other file; written last
    checkpoint.json             step, data cursor, the resolved config, versions
    tensors.json                where each piece of each tensor is
    weights-00000.safetensors   rank 0's pieces, under the parameters' names; likewise each rank's, and exp_avg-…,
                                exp_avg_sq-… of the optimizer
    tokenizer/                  the tokenizer's files

torch.distributed.checkpoint sees every tensor through the *storage view* (:mod:`colonnade.checkpoint.dtensor_view`).
What is stored is always the whole tensor in pieces, whatever the plan that wrote it.
"""

import importlib.metadata
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch
from pydantic import Field
from torch import Tensor
from torch.distributed import ProcessGroup

from colonnade.checkpoint import atomic_folder as folders
from colonnade.checkpoint.atomic_folder import FULL, Manifest
from colonnade.checkpoint.dcp_storage import DTYPES, INDEX, Index, part_of
from colonnade.checkpoint.dtensor_view import Moments, local_tensors, parameter_of, storage_view, storage_views
from colonnade.config import Config, ModelConfig, RunConfig, differences
from colonnade.errors import CapacityError, CheckpointError, ColonnadeError, ConfigError
from colonnade.model import Transformer
from colonnade.model.weight_only_quant import Place, in_place
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.parallel.fsdp import Masters
from colonnade.parallel.layout import layout_of

META = "checkpoint.json"
TOKENIZER = "tokenizer"
SMALL_FILES = 65536
"""More than the manifest's frame takes, and the line breaks of checkpoint.json [bytes]."""


class Meta(Config):
    """What a checkpoint knows of itself, so that no flag is needed to use it."""

    model: ModelConfig
    """The transformer."""
    run: RunConfig | None = None
    """The whole run, when one wrote it."""
    step: int = Field(default=0, ge=0)
    """Optimizer steps taken."""
    updates: int | None = Field(default=None, ge=0)
    """Of these, the steps that moved the weights: Adam's own count. None in older checkpoints: all did."""
    loss_scale: tuple[float, int] | None = None
    """float16: the scale of the next step, and the steps without an overflow since it last changed."""
    cursor: dict[str, Any] = Field(default_factory=dict)
    """Where in the data the next step begins."""
    tasks: tuple[str, ...] = ()
    """What the corpus calls the tasks that the router 'task' knows, by number."""
    colonnade: str = Field(default_factory=lambda: _version("colonnade"))
    """Version that wrote it."""
    torch: str = torch.__version__
    """Version of torch that wrote it."""


class Savable(Protocol):
    """A tokenizer."""

    @property
    def size_bytes(self) -> int:
        """What they take at most."""
        ...

    def save(self, folder: Path) -> None:
        """Write its files."""
        ...


def save(
    folder: Path,
    model: Transformer,
    meta: Meta,
    context: DistributedContext,
    *,
    masters: Masters | None = None,
    optimizer: Moments | None = None,
    tokenizer: Savable | None = None,
    overwrite: bool = False,
) -> None:
    """Write ``folder``, whole or not at all; every rank of ``ground`` calls it.

    With ``masters`` the float32 weights are written, without them the model's own. ``overwrite`` replaces a model that
    is there. Raises :class:`CheckpointError` when the folder exists or cannot be written, :class:`CapacityError` when
    the disk is full.
    """
    rest: dict[str, Any] = {"masters": masters, "optimizer": optimizer, "tokenizer": tokenizer, "overwrite": overwrite}
    writing(folder, model, meta, context, **rest)()


def writing(
    folder: Path,
    model: Transformer,
    meta: Meta,
    context: DistributedContext,
    *,
    masters: Masters | None = None,
    optimizer: Moments | None = None,
    tokenizer: Savable | None = None,
    overwrite: bool = False,
    stage: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict,
    group: ProcessGroup | None = None,
    after: Callable[[], object] = lambda: None,
) -> Callable[[], None]:
    """:func:`save` in two parts: what is returned writes, perhaps in a thread, when every rank calls it.

    ``stage`` copies this rank's tensors if they will move meanwhile; ``group`` is for the thread's own collectives;
    ``after`` is what rank 0 does when the folder is there.
    """
    from torch.distributed.checkpoint import state_dict_saver
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    from colonnade.checkpoint.dcp_storage import Writer

    if optimizer is not None:
        meta = meta.but(updates=optimizer.steps)
        if optimizer.steps > meta.step:
            raise CheckpointError(f"the optimizer took {optimizer.steps} steps, the checkpoint would say {meta.step}")

    def seal(place: Path) -> None:
        folders.write_json(place / META, meta.model_dump(mode="json"))
        if tokenizer is not None:
            (place / TOKENIZER).mkdir()
            tokenizer.save(place / TOKENIZER)

    views = storage_views(stage(local_tensors(model, masters, optimizer)), model, context, sharded=masters is not None)

    def write() -> None:
        try:
            _dcp(
                folder,
                state_dict_saver.save,
                views,
                storage_writer=Writer(
                    folder,
                    seal,
                    after,
                    overwrite=overwrite,
                    seal_bytes=SMALL_FILES + len(meta.model_dump_json()) + (tokenizer.size_bytes if tokenizer else 0),
                ),
                planner=DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
                process_group=group,
                no_dist=context.mesh is None,
            )
        except BaseException:
            if context.rank == 0:
                folders.discard(folder)
            raise

    return write


def load(
    folder: Path,
    model: Transformer,
    context: DistributedContext,
    *,
    masters: Masters | None = None,
    optimizer: Moments | None = None,
    trained: ModelConfig | None = None,
    place: Place = in_place,
) -> Meta:
    """Fill ``model`` (and what is given of ``masters`` and ``optimizer``) from ``folder``, under any plan.

    Each rank reads only its own boxes. ``trained`` is what the checkpoint was written as, where the model is told to do
    something else with the same weights. Weights that are on the meta device are handed to ``place`` one by one, in the
    type that they are stored in. Weights alone may be cast to the type that they are wanted in; with an
    optimizer the types must agree, or the run would not be the same run. Raises :class:`CheckpointError`, which names
    the file, for anything missing, damaged or foreign.
    """
    from torch.distributed.checkpoint import state_dict_loader
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

    from colonnade.checkpoint.dcp_storage import Reader

    manifest, meta, index = _open(folder)
    _same(folder, meta, trained or model.config)
    local = local_tensors(model, masters, optimizer)
    whole = model.whole_shapes()
    for key, tensor in local.items():
        entry = index.tensors.get(key)
        if entry is None:
            what, use = "weight", "use a checkpoint of this model"
            if not key.startswith("weights/"):
                what = "optimizer state"
                use = f"go on with train.freeze as it was, or begin another run with --train.start {folder}"
            raise CheckpointError(f"{folder / INDEX} has no {what} '{key}'; {use}")
        if tuple(whole[parameter_of(key)]) != entry.shape:
            raise CheckpointError(
                f"{folder / INDEX} has '{key}' of shape {entry.shape}, but the model needs "
                f"{tuple(whole[parameter_of(key)])}; use a checkpoint of this model"
            )
        if optimizer is not None and tensor.dtype != DTYPES[entry.dtype]:
            raise CheckpointError(
                f"{folder} holds '{key}' in {entry.dtype}, and this run keeps it in "
                f"{str(tensor.dtype).removeprefix('torch.')}; resume with the same train.dtype"
            )
    parts = {part_of(key)[0] for key in local}
    reader = Reader(folder, manifest, index, parts, rank=context.rank, world=context.world)
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    waiting = {key: tensor for key, tensor in local.items() if tensor.is_meta}
    layout = layout_of(model) if waiting else {}
    here = {key: tensor for key, tensor in local.items() if not tensor.is_meta}
    views = storage_views(here, model, context, sharded=masters is not None)
    with torch.no_grad():
        _dcp(folder, state_dict_loader.load, views, storage_reader=reader, planner=planner, no_dist=context.world == 1)
        for key, tensor in waiting.items():
            name = parameter_of(key)
            value = torch.empty(tensor.shape, dtype=DTYPES[index.tensors[key].dtype], device=context.device)
            view = (
                value if context.world == 1 else storage_view(value, layout[name], whole[name], context, sharded=False)
            )
            # The files' checksums have been looked at.
            reader = Reader(folder, manifest, index, set(), rank=context.rank, world=context.world)
            planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
            _dcp(folder, state_dict_loader.load, {key: view}, storage_reader=reader, planner=planner,
                 no_dist=context.world == 1)  # fmt: skip
            place(name, tensor, value)
    if optimizer is not None:
        optimizer.steps = meta.step if meta.updates is None else meta.updates
    if masters is not None:
        masters.update_model()
    return meta


def read_meta(folder: Path) -> Meta:
    """What a checkpoint says of itself: the config to build its model from, the step, the cursor."""
    return _open(folder)[1]


def check_model(folder: Path, model: ModelConfig) -> None:
    """Raise :class:`CheckpointError`, field by field, when the checkpoint ``folder`` is of another model."""
    _same(folder, read_meta(folder), model)


def is_native(folder: Path) -> bool:
    """Whether ``folder`` looks like a checkpoint of ours; a corpus has a manifest too."""
    return (folder / folders.MANIFEST).is_file() and any((folder / name).is_file() for name in (META, INDEX))


def newest(run: Path) -> Path | None:
    """The newest complete checkpoint of a run folder (``runs/NAME``), or None.

    A folder that lost files after it was written is passed over for the one before it; damage *inside* a file is
    found when it is loaded.
    """
    return next((folder for _, folder in folders.steps(run) if folders.complete(folder)), None)


def _open(folder: Path) -> tuple[Manifest, Meta, Index]:
    manifest = Manifest.read(folder)
    manifest.check_sizes(folder)
    manifest.check_contents(folder, [META, INDEX])
    try:
        meta = Meta(**folders.read_json(folder / META))
    except ConfigError as why:
        raise CheckpointError(
            f"{folder / META} does not fit this Colonnade: {why}; use the version that wrote it"
        ) from None
    return manifest, meta, Index.read(folder)


def _same(folder: Path, meta: Meta, expected: ModelConfig) -> None:
    if differ := ", ".join(differences(meta.model, expected, prefix="model.")):
        raise CheckpointError(
            f"{folder} holds another model than is asked for ({differ}); go on with the model as it was, or use "
            "another --name for another model"
        )


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # run from a source tree that was never installed
        return "unknown"


def _dcp(folder: Path, work: Callable[..., Any], views: dict[str, Tensor], **options: Any) -> None:
    """Run torch's save or load; turn its failures, which are no ``Exception``s, into ours."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        with warnings.catch_warnings() if options["no_dist"] else nullcontext():
            # Says that a single process was meant, when a single process was asked for. (Not in a thread beside
            # training, which has a group: the filters belong to the whole process.)
            if options["no_dist"]:
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            work(views, **options)
    except CheckpointException as failure:
        rank, (why, _) = min(failure.failures.items())
        if isinstance(why, OSError) and why.errno in FULL:
            raise CapacityError(f"the disk is full: {folder} was not written; free some space") from why
        if isinstance(why, OSError):
            raise CheckpointError(f"{folder}: {why.strerror or why} (rank {rank})") from why
        if isinstance(why, ColonnadeError):
            raise type(why)(str(why)) from None
        raise why from None
