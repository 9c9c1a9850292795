"""Equipment of notebooks. `%load_ext lab.notebook` adds the magics %ranks and %%ranks (magics.py)."""

from typing import Any


def load_ipython_extension(shell: Any) -> None:
    """Add the magics. IPython is imported only here, because scripts work without it."""
    from lab.notebook.magics import load_ipython_extension as load

    load(shell)
