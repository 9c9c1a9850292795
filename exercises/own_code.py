"""Find the learner's own lines in a traceback or in a hang's report, of a file or a notebook's cell."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle

_CELL = r"[^\s\"]*/ipykernel_\d+/\d+\.py|<ipython-input-[^>\s]+>"


class OwnCode(NamedTuple):
    """The names, as a regular expression, that Python gives to the files or cells with the learner's code."""

    names: str

    def line_in_traceback(self, trace: str) -> str:
        """Return the innermost line of the learner's code: "line 12 of ring.py", or ""."""
        found = re.findall(rf'File "({self.names})", line (\d+)', trace)
        return _shown(*found[-1]) if found else ""

    def line_in_stack(self, stack: str) -> str:
        """Return the innermost line of the learner's code in one rank's part of a hang's report, or ""."""
        found = re.search(rf"({self.names}):(\d+) in", stack)
        return _shown(found[1], found[2]) if found else ""


def own_code(file: Path) -> OwnCode:
    """Return where the learner's code is: in this file or, for a pickle, where its functions are from."""
    if file.suffix == ".py":
        return OwnCode(re.escape(str(file.resolve())))
    functions: dict[str, Callable[..., Any]] = cloudpickle.loads(file.read_bytes())
    codes = [getattr(function, "__code__", None) for function in functions.values()]
    names = {code.co_filename for code in codes if code is not None}
    return OwnCode("|".join([*map(re.escape, sorted(names)), _CELL]))


def _shown(name: str, line: str) -> str:
    return f"line {line} of {'your cell' if re.fullmatch(_CELL, name) else Path(name).name}"
