"""Make digits.npz from the copy of the data set in scikit-learn. Every run makes the same bytes.

pip install --no-deps --target /tmp/sk scikit-learn
PYTHONPATH=/tmp/sk python lab/models/data/make_digits.py
"""

import gzip
import io
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import numpy as np


def read_digits() -> dict[str, np.ndarray]:
    """Return `images` (1797, 8, 8) from 0 to 16 and `labels` (1797,), uint8. Exit without scikit-learn."""
    spec = find_spec("sklearn")
    if spec is None or spec.origin is None:
        sys.exit("scikit-learn is not installed: run the commands at the top of this script")
    with gzip.open(Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz") as rows:
        table = np.loadtxt(rows, delimiter=",").astype(np.uint8)
    return {"images": table[:, :-1].reshape(-1, 8, 8), "labels": table[:, -1]}


def write_npz(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Write the file that np.savez_compressed would write, but with a fixed date."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, array in arrays.items():
            content = io.BytesIO()
            np.lib.format.write_array(content, np.ascontiguousarray(array), allow_pickle=False)
            entry = zipfile.ZipInfo(f"{name}.npy", date_time=(1980, 1, 1, 0, 0, 0))
            archive.writestr(entry, content.getvalue(), zipfile.ZIP_DEFLATED, compresslevel=9)


if __name__ == "__main__":
    write_npz(Path(__file__).with_name("digits.npz"), read_digits())
