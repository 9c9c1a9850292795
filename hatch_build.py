"""Puts the repository before site-packages when it is installed with `pip install -e .`.

Jupyter's kernel brings a package that is called `comm` too. An ordinary editable install adds the
repository *behind* site-packages, so `import comm` would find Jupyter's. This hook installs a module that
puts the repository first, and a .pth line that runs it; comm/__init__.py then leaves Jupyter's own submodules
in reach. Where a second checkout shares the environment, a script of that checkout imports its own packages.
"""

import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

MODULE = '''"""Put one checkout of the workbook before site-packages (written by its hatch_build.py)."""

import os
import sys

INSTALLED = {root!r}


def checkout_of_script(arguments: list[str]) -> str | None:
    """Return the checkout that holds the script on this command line, or None if there is no such script."""
    for argument in arguments:
        root = os.path.dirname(os.path.realpath(argument))
        for _ in range(2):  # a script lies in a lesson's folder, or in a folder of that
            root = os.path.dirname(root)
            if argument.endswith(".py") and os.path.isfile(os.path.join(root, "comm", "rendezvous.py")):
                return root
    return None


if checkout := checkout_of_script(sys.orig_argv[1:]):
    sys.path.insert(0, checkout)
else:
    # Behind PYTHONPATH, which the user has chosen.
    site_packages = os.path.dirname(__file__)
    sys.path.insert(sys.path.index(site_packages) if site_packages in sys.path else 0, INSTALLED)
'''


class RepositoryFirst(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version != "editable":
            return
        self.folder = tempfile.TemporaryDirectory()
        files = {
            "distributed_training_workbook_path.py": MODULE.replace("{root!r}", repr(self.root)),
            "distributed_training_workbook.pth": "import distributed_training_workbook_path\n",
        }
        for name, text in files.items():
            path = Path(self.folder.name) / name
            path.write_text(text)
            build_data["force_include_editable"][str(path)] = name

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if version == "editable":
            self.folder.cleanup()
