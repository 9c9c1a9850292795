"""Equipment of notebooks. `%load_ext lab.notebook` adds the magics %ranks and %%ranks (magics.py)."""

import atexit
from pathlib import Path
from typing import Any

from lab.launch.errors import WorkbookError

KERNEL = "Choose .venv as this notebook's kernel; `make setup` makes it."
REPOSITORY = Path(__file__).resolve().parents[2]  # where the lessons are, wherever the notebook is


def load_ipython_extension(shell: Any) -> None:
    """Register the magic commands, `push` and `pull`, and begin to import torch for the ranks.

    Raise WorkbookError in a kernel without the libraries, or with the workbook of another clone.
    """
    beside = Path("../lab/notebook/__init__.py").resolve()
    if beside.exists() and beside != Path(__file__).resolve():
        raise WorkbookError(f"This kernel runs the workbook in {REPOSITORY}, another clone. {KERNEL}")
    try:  # only here, because scripts work without IPython, and predictions without torch
        from lab.notebook.magics import RanksMagics
        from lab.ranks import forked
    except ModuleNotFoundError as error:
        raise WorkbookError(f"This kernel has no {error.name}. {KERNEL}") from error

    forked.warm_up()
    magics = RanksMagics(shell)
    shell.register_magics(magics)
    shell.push({"push": magics.push, "pull": magics.pull})
    atexit.register(magics.stop)


def unload_ipython_extension(shell: Any) -> None:
    """Stop the ranks, and take back what `load_ipython_extension` has registered; also for %reload_ext."""
    magics = shell.magics_manager.registry.pop("RanksMagics")
    magics.stop()
    atexit.unregister(magics.stop)
    places = [(shell.user_ns, "push"), (shell.user_ns, "pull")]
    places += [
        (shell.magics_manager.magics[kind], name) for kind in magics.magics for name in magics.magics[kind]
    ]
    for table, name in places:
        if getattr(table.get(name), "__self__", None) is magics:
            del table[name]
