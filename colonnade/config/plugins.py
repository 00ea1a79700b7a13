"""User modules that register routers when they are imported.

``colonnade VERB --import my_routers`` calls :func:`load_plugin`; a program may call it too. The launcher imports the
same modules in every process that it starts. A configuration or checkpoint never names a module.
"""

import importlib
import sys
from pathlib import Path

from colonnade.errors import ConfigError

_loaded: list[str] = []


def load_plugin(name: str) -> None:
    """Import the module ``name`` from the current folder or the Python path, here and in processes launched later.

    Raises :class:`ConfigError` if there is no such module or its code fails.
    """
    folder = str(Path.cwd())
    if folder not in sys.path:  # sys.path of a console script begins with the script's folder
        sys.path.insert(0, folder)
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        importer = "" if missing == name else f", which {name} imports,"
        raise ConfigError(
            f"--import {name}: no module '{missing}'{importer} in {folder} or on the Python path; run in the folder "
            "that contains it, or set PYTHONPATH"
        ) from error
    except Exception as error:
        raise ConfigError(f"--import {name}: the module failed with {type(error).__name__}: {error}") from error
    if name not in _loaded:
        _loaded.append(name)


def loaded_plugins() -> tuple[str, ...]:
    """The modules that :func:`load_plugin` imported, in order."""
    return tuple(_loaded)
