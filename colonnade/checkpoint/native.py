"""Native checkpoints: one folder with weights and optimizer state that loads under any plan.

    manifest.json               size and SHA-256 of every other file; written last
    checkpoint.json             step, data cursor, the resolved config, versions
    tensors.json                the pieces of each tensor and their files
    weights-00000.safetensors   rank 0's pieces, under the parameters' names; the same for each rank, and for the
                                optimizer's exp_avg-… and exp_avg_sq-…
    tokenizer/                  the tokenizer's files

A checkpoint of a model with adapters has only these; the rest is the model that ``run.train.pretrained_checkpoint``
names.

torch.distributed.checkpoint (DCP) sees every tensor as a DTensor (:mod:`colonnade.checkpoint.dtensor_view`). A
checkpoint always contains whole tensors, in pieces, whatever the plan that wrote it.
"""

import importlib.metadata
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Protocol, get_args

import torch
from pydantic import Field
from torch import Tensor
from torch.distributed import ProcessGroup

from colonnade.checkpoint import atomic_folder
from colonnade.checkpoint.atomic_folder import DISK_FULL_ERRNOS, Manifest
from colonnade.checkpoint.dtensor_view import OptimizerState, component_view, local_tensors, storage_view, storage_views
from colonnade.checkpoint.quantised_components import component_specs, components, empty_quantised
from colonnade.checkpoint.tensor_index import DTYPES, INDEX, Index, split_key
from colonnade.config import Config, ModelConfig, RunConfig, differences
from colonnade.config.serve import Pooling
from colonnade.errors import CapacityError, CheckpointError, ColonnadeError, ConfigError
from colonnade.model import Transformer
from colonnade.model.weight_only_quant import StoredFormat, StoreWeight, copy_weight, dense, quantised_parameters
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.parallel.fsdp import Masters
from colonnade.parallel.layout import WHOLE, layout_of, local_part

META = "checkpoint.json"
TOKENIZER = "tokenizer"
MAX_MANIFEST_BYTES = 65536
"""An upper bound for the manifest without its entries, and for the line breaks of checkpoint.json."""


class Meta(Config):
    """``checkpoint.json``: what is needed to use a checkpoint without flags."""

    model: ModelConfig
    run: RunConfig | None = None
    """The whole run, when one wrote it."""
    step: int = Field(default=0, ge=0)
    """Optimizer steps taken."""
    updates: int | None = Field(default=None, ge=0)
    """Of these, the steps that changed the weights: Adam's own count. None in older checkpoints: all did."""
    loss_scale: tuple[float, int] | None = None
    """float16: the scale of the next step, and the steps without an overflow since it last changed."""
    cursor: dict[str, Any] = Field(default_factory=dict)
    """The position in the data at which the next step begins."""
    quantised: dict[str, StoredFormat] = Field(default_factory=dict)
    """The parameters whose matrices are stored quantised, as NAME.values and NAME.scales."""
    tasks: tuple[str, ...] = ()
    """The corpus's names for the tasks of the router 'task', by number."""
    colonnade: str = Field(default_factory=lambda: _version("colonnade"))
    """Version of Colonnade that wrote it."""
    torch: str = torch.__version__
    """Version of torch that wrote it."""


class SavableTokenizer(Protocol):
    """The tokenizer interface that a native checkpoint uses."""

    @property
    def size_bytes(self) -> int:
        """An upper bound for the size of its files."""
        ...

    def save(self, folder: Path) -> None:
        """Writes its files."""
        ...


def read_embedding_pooling(folder: Path) -> Pooling | None:
    """The pooling of a model that was tuned to embed texts; None for other folders."""
    if not is_native(folder):
        return None
    cursor = read_meta(folder).cursor
    pooling = cursor.get("pooling") if cursor.get("method") == "embed" else None
    return pooling if pooling in get_args(Pooling) else None


def read_class_names(folder: Path) -> tuple[str, ...]:
    """The names of the classes of a fine-tuned classifier, by number; empty if the checkpoint has none."""
    if not is_native(folder):
        return ()
    names = read_meta(folder).cursor.get("classes") or ()
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"{folder / META} has classes that are not names: {str(names)[:60]}; restore the file")
    return tuple(names)


def save(
    folder: Path,
    model: Transformer,
    meta: Meta,
    context: DistributedContext,
    *,
    masters: Masters | None = None,
    optimizer: OptimizerState | None = None,
    tokenizer: SavableTokenizer | None = None,
    overwrite: bool = False,
) -> None:
    """Writes ``folder`` atomically; every rank of ``context`` must call it.

    With ``masters`` the float32 weights are written, otherwise the model's own. ``overwrite`` replaces an existing
    model. Raises :class:`CheckpointError` when the folder exists or cannot be written, :class:`CapacityError` when the
    disk is full.
    """
    prepare_save(
        folder, model, meta, context, masters=masters, optimizer=optimizer, tokenizer=tokenizer, overwrite=overwrite
    )()


def prepare_save(
    folder: Path,
    model: Transformer,
    meta: Meta,
    context: DistributedContext,
    *,
    masters: Masters | None = None,
    optimizer: OptimizerState | None = None,
    tokenizer: SavableTokenizer | None = None,
    overwrite: bool = False,
    stage: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict,
    group: ProcessGroup | None = None,
    on_commit: Callable[[], object] = lambda: None,
) -> Callable[[], None]:
    """Prepares :func:`save` and returns the function that writes, which may run in a thread on every rank.

    ``stage`` copies this rank's tensors when training continues meanwhile; ``group`` is for the thread's collectives;
    rank 0 calls ``on_commit`` after the folder is in place.
    """
    from torch.distributed.checkpoint import state_dict_saver
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    from colonnade.checkpoint.dcp_storage import Writer

    if meta.model.lora is None and (quantised := quantised_parameters(model)):  # of adapters, nothing else is stored
        meta = meta.replace(quantised={name: StoredFormat.of(weight) for name, weight in quantised.items()})
    if optimizer is not None:
        meta = meta.replace(updates=optimizer.steps)
        if optimizer.steps > meta.step:
            raise CheckpointError(
                f"the optimizer took {optimizer.steps} steps, the checkpoint would record step {meta.step}"
            )

    def write_metadata(partial: Path) -> None:
        atomic_folder.write_json(partial / META, meta.model_dump(mode="json"))
        if tokenizer is not None:
            (partial / TOKENIZER).mkdir()
            tokenizer.save(partial / TOKENIZER)

    local = local_tensors(model, masters, optimizer, adapters=meta.model.lora is not None)
    views = storage_views(stage(local), model, context, sharded=masters is not None)

    def write() -> None:
        metadata_bytes = MAX_MANIFEST_BYTES + len(meta.model_dump_json()) + (tokenizer.size_bytes if tokenizer else 0)
        try:
            _run_dcp(
                folder,
                state_dict_saver.save,
                views,
                storage_writer=Writer(
                    folder, write_metadata, on_commit, overwrite=overwrite, metadata_bytes=metadata_bytes
                ),
                planner=DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
                process_group=group,
                no_dist=context.mesh is None,
            )
        except BaseException:
            if context.rank == 0:
                atomic_folder.remove_partial(folder)
            raise

    return write


def load(
    folder: Path,
    model: Transformer,
    context: DistributedContext,
    *,
    masters: Masters | None = None,
    optimizer: OptimizerState | None = None,
    trained: ModelConfig | None = None,
    place: StoreWeight = copy_weight,
    collective: bool = True,
) -> Meta:
    """Loads ``folder`` into ``model``, and into ``masters`` and ``optimizer`` where given, under any plan.

    Each rank reads only its own boxes. ``trained`` is the config that the checkpoint was written with, when ``model``
    uses the same weights under another config. Parameters on the meta device are passed to ``place`` one by one, in
    the dtype in which they are stored, and so are those that the checkpoint stores quantised, as
    :class:`~colonnade.kernels.linear.quantise.Quantised`. Without ``collective`` the ranks do not communicate, so that
    each may load in a thread: a failure is then raised only on the rank that has it. Weights alone may be cast to
    another dtype; with an optimizer the dtypes must agree, or the resumed run would compute something else. Raises
    :class:`CheckpointError`, naming the file, for anything missing, damaged or unknown.
    """
    from torch.distributed.checkpoint import state_dict_loader
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

    from colonnade.checkpoint.dcp_storage import Reader

    manifest, meta, index = _read_metadata(folder)
    _check_same_model(folder, meta, trained or model.config)
    local = local_tensors(model, masters, optimizer, adapters=meta.model.lora is not None)
    shapes = model.global_shapes()
    stored = {f"weights/{name}": form for name, form in meta.quantised.items()}
    if stored and optimizer is not None:
        raise CheckpointError(
            f"{folder} stores quantised weights, which a run cannot resume from; start one with "
            f"--train.pretrained_checkpoint {folder}"
        )
    for key, tensor in local.items():
        if key not in stored:
            _check_tensor(folder, index, key, tensor, shapes[split_key(key)[1]], resuming=optimizer is not None)

    def read(views: dict[str, Tensor], verify: set[str]) -> None:
        """``verify``: the parts whose checksums are checked first."""
        reader = Reader(folder, manifest, index, verify, rank=context.rank, world=context.world)
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        _run_dcp(folder, state_dict_loader.load, views, storage_reader=reader, planner=planner,
                 no_dist=context.world == 1 or not collective)  # fmt: skip

    on_meta = {key: tensor for key, tensor in local.items() if tensor.is_meta and key not in stored}
    layout = layout_of(model) if on_meta or stored else {}
    allocated = {key: tensor for key, tensor in local.items() if not tensor.is_meta and key not in stored}
    with torch.no_grad():
        views = storage_views(allocated, model, context, sharded=masters is not None)
        read(views, verify={split_key(key)[0] for key in local})
        for key, tensor in on_meta.items():
            name = split_key(key)[1]
            value = torch.empty(tensor.shape, dtype=DTYPES[index.tensors[key].dtype], device=context.device)
            view = value
            if context.world > 1:
                view = storage_view(value, layout.get(name, WHOLE), shapes[name], context, sharded=False)
            read({key: view}, verify=set())
            place(name, tensor, value)
        for key, form in stored.items():
            name = split_key(key)[1]
            if key not in local:
                continue  # another pipeline stage's
            part = local_part(torch.empty(shapes[name], device="meta"), layout[name], model.axes).shape
            _check_components(folder, index, key, form, shapes[name])
            weight = empty_quantised(key, form, part, context.device)
            views = dict(components(key, weight))
            if context.world > 1:
                views = {k: component_view(k, x, form, layout[name], shapes[name], context) for k, x in views.items()}
            read(views, verify=set())
            if masters is None:
                place(name, local[key], weight)
            else:
                masters.assign(name, local[key], dense(name, weight))
    if optimizer is not None:
        optimizer.steps = meta.step if meta.updates is None else meta.updates
    if masters is not None:
        masters.update_model()
    return meta


def read_meta(folder: Path) -> Meta:
    """Reads ``checkpoint.json``: the config of the model, the step, the data cursor."""
    return _read_metadata(folder)[1]


def check_model(folder: Path, model: ModelConfig) -> None:
    """Raises :class:`CheckpointError`, naming the fields that differ, unless ``folder`` is of ``model``."""
    _check_same_model(folder, read_meta(folder), model)


def is_native(folder: Path) -> bool:
    """Whether ``folder`` looks like a native checkpoint (a corpus has a manifest too)."""
    return (folder / atomic_folder.MANIFEST).is_file() and any((folder / name).is_file() for name in (META, INDEX))


def newest(run: Path) -> Path | None:
    """The newest complete checkpoint of a run folder (``runs/NAME``), or None.

    A folder that has lost files is skipped; damage *inside* a file is detected on loading.
    """
    steps = atomic_folder.list_steps(run)
    return next((folder for _, folder in steps if atomic_folder.is_complete(folder)), None)


def _read_metadata(folder: Path) -> tuple[Manifest, Meta, Index]:
    manifest = Manifest.read(folder)
    manifest.check_sizes(folder)
    manifest.check_contents(folder, [META, INDEX])
    try:
        meta = Meta(**atomic_folder.read_json(folder / META))
    except ConfigError as why:
        raise CheckpointError(
            f"{folder / META} does not fit this version of Colonnade: {why}; use the version that wrote it"
        ) from None
    return manifest, meta, Index.read(folder)


def _check_components(folder: Path, index: Index, key: str, form: StoredFormat, shape: torch.Size) -> None:
    """Raise :class:`CheckpointError` unless the checkpoint has the parameter ``key`` in the format ``form``."""
    for name, expected, dtype in component_specs(key, form, shape):
        entry = index.tensors.get(name)
        if entry is None or DTYPES[entry.dtype] != dtype or entry.shape != tuple(expected):
            has = "no such tensor" if entry is None else f"{entry.shape} in {entry.dtype}"
            raise CheckpointError(
                f"{META} of {folder} says that '{key}' is in {form.kind}, of {tuple(expected)} "
                f"{str(dtype).removeprefix('torch.')} values, and {INDEX} has {has}; use another checkpoint"
            )


def _check_same_model(folder: Path, meta: Meta, expected: ModelConfig) -> None:
    if differ := ", ".join(differences(meta.model, expected, prefix="model.")):
        raise CheckpointError(
            f"{folder} is a checkpoint of another model ({differ}); resume with the model settings of the checkpoint, "
            "or use another --name for another model"
        )


def _check_tensor(folder: Path, index: Index, key: str, tensor: Tensor, shape: torch.Size, *, resuming: bool) -> None:
    """Raises unless the checkpoint has ``key`` in this whole shape and, when ``resuming``, in the tensor's dtype."""
    entry = index.tensors.get(key)
    if entry is None:
        kind, remedy = "weight", "use a checkpoint of this model"
        if not key.startswith("weights/"):
            kind = "optimizer state"
            remedy = (
                f"resume with the same train.freeze, or start another run with --train.pretrained_checkpoint {folder}"
            )
        raise CheckpointError(f"{folder / INDEX} has no {kind} '{key}'; {remedy}")
    if tuple(shape) != entry.shape:
        raise CheckpointError(
            f"{folder / INDEX} has '{key}' of shape {entry.shape}, but the model needs {tuple(shape)}; "
            "use a checkpoint of this model"
        )
    if resuming and tensor.dtype != DTYPES[entry.dtype]:
        raise CheckpointError(
            f"{folder} contains '{key}' in {entry.dtype}, but this run uses "
            f"{str(tensor.dtype).removeprefix('torch.')}; resume with the same train.dtype"
        )


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # run from a source tree that was never installed
        return "unknown"


def _run_dcp(folder: Path, function: Callable[..., Any], views: dict[str, Tensor], **options: Any) -> None:
    """Runs DCP's save or load; converts its failures, which are not subclasses of ``Exception``, to our errors."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        with warnings.catch_warnings() if options["no_dist"] else nullcontext():
            # DCP warns that it assumes a single process. (Not suppressed in a thread that runs alongside training,
            # which has a group: warning filters are global to the process.)
            if options["no_dist"]:
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            function(views, **options)
    except CheckpointException as failure:
        rank, (why, _) = min(failure.failures.items())
        if isinstance(why, OSError) and why.errno in DISK_FULL_ERRNOS:
            raise CapacityError(f"the disk is full: {folder} was not written; free some space") from why
        if isinstance(why, OSError):
            raise CheckpointError(f"{folder}: {why.strerror or why} (rank {rank})") from why
        if isinstance(why, ColonnadeError):
            raise type(why)(str(why)) from None
        raise why from None
