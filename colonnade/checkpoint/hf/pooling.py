"""Reads how a Hugging Face folder's model is pooled: sentence-transformers' files, and a classifier's labels.

    modules.json                  the modules after the transformer: Pooling, Normalize
    1_Pooling/config.json         mean, the first token ([CLS]) or the last one
    sentence_bert_config.json     max_seq_length: the longest text that the model was made for
    config.json                   id2label, problem_type, and a cross-encoder's activation

Anything else is refused: the vectors would differ from the model's.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from colonnade.checkpoint.atomic_folder import read_json
from colonnade.config.serve import ClassActivation, Pooling
from colonnade.errors import CheckpointError

_KINDS: dict[str, Pooling] = {
    "pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls", "pooling_mode_lasttoken": "last",
    "mean": "mean", "cls": "cls", "lasttoken": "last",
}  # fmt: skip
"""Keys of older files, and values of the one key of newer ones."""


@dataclass(frozen=True)
class StoredPooling:
    """Pooling and classes of a model's folder; None for settings missing from its files."""

    kind: Pooling | None = None
    normalize: bool | None = None
    max_tokens: int | None = None
    """The longest text [tokens]."""
    labels: tuple[str, ...] = ()
    activation: ClassActivation | None = None


def read_pooling(folder: Path, *, kind: bool = True) -> StoredPooling:
    """Read the files of ``folder`` that exist; ``kind`` False skips the pooling module, which may be of any kind.

    Raises :class:`CheckpointError` for a damaged file and for a module that is not implemented.
    """
    if not folder.is_dir():
        return StoredPooling()
    stored, normalize = None, None
    if (file := folder / "modules.json").is_file():
        stored, normalize = _read_modules(file, kind)
    limit, labels, activation = None, (), None
    if (file := folder / "sentence_bert_config.json").is_file():
        limit = read_json(file).get("max_seq_length")
        if limit is not None and (type(limit) is not int or limit < 1):
            raise CheckpointError(f"{file} sets 'max_seq_length' to {limit!r}; a positive whole number was expected")
    if (file := folder / "config.json").is_file():
        config = read_json(file)
        labels, activation = _labels(config, file), _activation(config, file)
    return StoredPooling(stored, normalize, limit, labels, activation)


def write_pooling(folder: Path, kind: Pooling, width: int) -> None:
    """Add sentence-transformers' files to the folder of a model with embeddings that are pooled this way and
    normalised.
    """
    modules = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")]
    (folder / "1_Pooling").mkdir(exist_ok=True)
    modes = {f"pooling_mode_{name}": each == kind for name, each in
             (("cls_token", "cls"), ("mean_tokens", "mean"), ("lasttoken", "last"))}  # fmt: skip
    values = {"word_embedding_dimension": width, **modes}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(values, indent=2), "utf-8")
    entries = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{name}"}
        for i, (name, path) in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(entries, indent=2), "utf-8")


def write_class_names(folder: Path, names: Sequence[str]) -> None:
    """Name the classes in the ``config.json`` of a classifier's folder."""
    file = folder / "config.json"
    values = read_json(file)
    values |= {
        "id2label": {str(i): name for i, name in enumerate(names)},
        "label2id": {n: i for i, n in enumerate(names)},
    }
    file.write_text(json.dumps(values, indent=2) + "\n", "utf-8")


def _read_modules(file: Path, with_kind: bool) -> tuple[Pooling | None, bool]:
    kind: Pooling | None = None
    normalize = False
    try:
        modules = json.loads(file.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not JSON: {error}; download it again") from None
    if not isinstance(modules, list) or not all(isinstance(each, dict) for each in modules):
        raise CheckpointError(f"{file} is not a list of modules; download it again")
    for module in modules:
        name = str(module.get("type", "")).rpartition(".")[2]
        if name == "Pooling" and with_kind:
            kind = _pooling_kind(file.parent / str(module.get("path", "")) / "config.json")
        elif name == "Normalize":
            normalize = True
        elif name not in ("Transformer", "Pooling"):
            raise CheckpointError(
                f"{file} has the module '{name}' after the transformer; only Pooling and Normalize are implemented"
            )
    return kind, normalize


def _pooling_kind(file: Path) -> Pooling:
    values = read_json(file)
    found = [name for name, value in values.items() if name.startswith("pooling_mode_") and value is True]
    if isinstance(mode := values.get("pooling_mode"), str):  # newer files have this one key
        found = [mode]
    chosen: list[Pooling] = [_KINDS[name] for name in found if name in _KINDS]
    if len(chosen) != 1 or len(found) != 1:
        raise CheckpointError(
            f"{file} pools by {' and '.join(found) or 'nothing'}; only mean, cls or lasttoken is implemented: choose "
            "one with --serve.pooling if different vectors are acceptable"
        )
    return chosen[0]


def _labels(config: dict[str, Any], file: Path) -> tuple[str, ...]:
    names = config.get("id2label")
    if names is None:
        return ()
    keys = [str(i) for i in range(len(names))] if isinstance(names, dict) else []
    if not keys or set(names) != set(keys) or not all(isinstance(name, str) for name in names.values()):
        raise CheckpointError(f"{file} has an 'id2label' that does not map the numbers 0, 1, … to names; fix it")
    return tuple(names[key] for key in keys)


def _activation(config: dict[str, Any], file: Path) -> ClassActivation | None:
    """sentence-transformers' activation of a cross-encoder, or that of transformers' ``problem_type``."""
    nested = config.get("sentence_transformers")
    name = nested.get("activation_fn") if isinstance(nested, dict) else None
    name = name or config.get("sbert_ce_default_activation_function")
    if name is not None:
        known: dict[str, ClassActivation] = {"Identity": "identity", "Sigmoid": "sigmoid"}
        if (kind := known.get(str(name).rpartition(".")[2])) is None:
            raise CheckpointError(f"{file} names the activation {name!r}; only Identity and Sigmoid work")
        return kind
    problems: dict[object, ClassActivation] = {
        "multi_label_classification": "sigmoid", "single_label_classification": "softmax", "regression": "identity",
    }  # fmt: skip
    return problems.get(config.get("problem_type"))
