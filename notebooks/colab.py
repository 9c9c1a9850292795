"""Install the workbook for a notebook that was opened without it, as in Colab; its first cell runs this file.

The kernel runs already: so the packages that it has loaded stay in it, in the versions that it found. Where
the workbook needs others, the session must be restarted once.
"""

import importlib.metadata
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHARED = ("numpy", "torch", "matplotlib")  # a kernel may have loaded them


def versions() -> dict[str, str]:
    found = importlib.metadata.distributions()
    return {one.name: one.version for one in found if one.name in SHARED and one.name in sys.modules}


before = versions()
index = [] if shutil.which("nvidia-smi") else ["--extra-index-url", "https://download.pytorch.org/whl/cpu"]
subprocess.run([sys.executable, "-m", "pip", "install", "-q", *index, "-e", str(ROOT)], check=True)
importlib.invalidate_caches()
sys.path.insert(0, str(ROOT))  # a new process finds the workbook without this
if "comm" in sys.modules:  # Jupyter has a package of this name; comm/__init__.py says how they share it
    sys.modules["comm"].__path__.insert(0, str(ROOT / "comm"))
if before != versions():
    print("Restart the session now (Runtime > Restart session), and run this cell again.")
