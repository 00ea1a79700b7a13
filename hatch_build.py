"""Adds the compiled C++ kernels of a CPU to a wheel, which is then one for this platform.

Without a compiler the wheel has none, and the kernels are compiled at first use. A wheel for other Linux distributions
is built in a manylinux image, and tagged by auditwheel.
"""

import importlib.util
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER = "colonnade/kernels/cpu"


class CompiledKernels(BuildHookInterface[Any]):
    """Compiles for all instruction sets that this platform's processors may have."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and add the files and the platform's tag to ``build_data``."""
        if version == "editable":
            return
        spec = importlib.util.spec_from_file_location("library", Path(self.root, FOLDER, "library.py"))
        assert spec is not None
        assert spec.loader is not None
        library = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(library)
        self._temporary = tempfile.TemporaryDirectory()
        try:
            files = library.build_all(Path(self._temporary.name))
        except library.BuildError as error:
            self.app.display_warning(f"a wheel without compiled kernels: {error}")
            return
        for file in files:
            file.chmod(0o755)
            build_data["force_include"][str(file)] = f"{FOLDER}/built/{file.name}"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
