"""Puts the repository before site-packages when it is installed with `pip install -e .`.

Jupyter's kernel brings a package that is called `comm` too. An ordinary editable install adds the
repository *behind* site-packages, so `import comm` would find Jupyter's. This hook adds one .pth line
that puts the repository first; comm/__init__.py then leaves Jupyter's own submodules in reach.
"""

import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class RepositoryFirst(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version != "editable":
            return
        self.folder = tempfile.TemporaryDirectory()
        pth = Path(self.folder.name) / "workbook.pth"
        pth.write_text(f"import sys; sys.path.insert(0, {self.root!r})\n")
        build_data["force_include_editable"][str(pth)] = "distributed_training_workbook.pth"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if version == "editable":
            self.folder.cleanup()
