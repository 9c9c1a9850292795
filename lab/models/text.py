"""Load the text on which the lessons train, and divide it among the ranks.

The corpus is the source of Python's own standard library, with bytes as tokens: real text without a download.
Another version of Python has other sources, so the ranks of a job compare their data (comm.same_start).

The global batch of a step is a pure function of (seed, step). A rank takes its slice of it, so N ranks
together see exactly what one process sees. Shapes by suffix: b batch, t time (position in the text).
"""

import sysconfig
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lab.launch.errors import WorkbookError

# All of these files are in Python 3.11, 3.12, 3.13 and 3.14.
LISTING = """
argparse.py ast.py asyncio/events.py asyncio/streams.py asyncio/tasks.py base64.py calendar.py
collections/__init__.py concurrent/futures/_base.py configparser.py contextlib.py copy.py csv.py
dataclasses.py difflib.py email/message.py enum.py functools.py heapq.py http/client.py http/server.py
ipaddress.py json/decoder.py json/encoder.py logging/__init__.py multiprocessing/connection.py
multiprocessing/pool.py os.py pickle.py pprint.py queue.py random.py selectors.py shutil.py socket.py
socketserver.py statistics.py subprocess.py tempfile.py textwrap.py threading.py tokenize.py
urllib/parse.py urllib/request.py weakref.py xml/etree/ElementTree.py
"""
FILES = LISTING.split()


def load_corpus() -> Tensor:
    """Return all `FILES` in order as uint8, shape (bytes,). Raise WorkbookError for a missing file."""
    root, corpus = Path(sysconfig.get_path("stdlib")), bytearray()
    for name in FILES:
        try:
            corpus += (root / name).read_bytes()
        except FileNotFoundError:
            raise WorkbookError(
                f"the corpus needs {root / name} of Python's standard library, which is missing: "
                "run with a full installation of Python 3.11 to 3.14"
            ) from None
    return torch.frombuffer(corpus, dtype=torch.uint8)


def split(corpus: Tensor) -> tuple[Tensor, Tensor]:
    """Return (train, validation): the last twentieth of the corpus is for validation."""
    cut = len(corpus) - len(corpus) // 20
    return corpus[:cut], corpus[cut:]


def global_batch(
    corpus: Tensor, seed: int, step: int, batch_size: int, block_size: int
) -> tuple[Tensor, Tensor]:
    """Return (x_bt, y_bt), int64: random windows of `block_size` bytes, and the same windows one byte later.

    Raise WorkbookError if the corpus is not longer than a window.
    """
    if len(corpus) <= block_size:
        raise WorkbookError(f"a block size of {block_size} needs a longer corpus than {len(corpus)} bytes")
    starts = np.random.default_rng((seed, step)).integers(len(corpus) - block_size, size=batch_size)
    windows = torch.from_numpy(starts)[:, None] + torch.arange(block_size)
    return corpus[windows].long(), corpus[windows + 1].long()


def rank_slice(batch: Tensor, rank: int, world_size: int) -> Tensor:
    """Return the rank-th of `world_size` equal parts of a batch. Raise WorkbookError if it has none."""
    if len(batch) % world_size:
        raise WorkbookError(
            f"{world_size} ranks cannot share a global batch of {len(batch)} equally: choose a multiple of "
            f"{world_size}, such as --batch-size {(len(batch) // world_size + 1) * world_size}"
        )
    return batch.chunk(world_size)[rank]


def microbatches(x: Tensor, y: Tensor, num_microbatches: int) -> list[tuple[Tensor, Tensor]]:
    """Return (x, y) split into equal views along dimension 0. Raise WorkbookError if that is impossible."""
    if len(x) % num_microbatches:
        raise WorkbookError(f"num_microbatches {num_microbatches} must divide the batch of {len(x)}")
    return list(zip(x.chunk(num_microbatches), y.chunk(num_microbatches), strict=True))
