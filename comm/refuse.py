"""Arguments of a training run that make no sense, refused in a sentence before anything is trained."""

import math
import tempfile
from pathlib import Path

from comm.collectives import barrier
from lab import units
from lab.cluster import Cluster
from lab.errors import WorkbookError

MAX_BUCKET_MB = 1 << 20  # a TiB
SEEDS = 1 << 32


def numbers(steps: int, batch_size: int, lr: float, seed: int) -> None:
    """Refuse what no run can train with."""
    if steps < 1:
        raise WorkbookError(f"--steps {steps}: there must be at least one.")
    if batch_size < 1:
        raise WorkbookError(f"--batch-size {batch_size}: there must be at least one example.")
    if not 0 < lr < math.inf:
        raise WorkbookError(f"--lr {lr:g}: a learning rate is a number above 0, such as 0.001.")
    if not 0 <= seed < SEEDS:
        raise WorkbookError(f"--seed {seed}: a seed is a whole number from 0 to {SEEDS - 1}.")


def bucket(megabytes: float) -> None:
    """Refuse a cap that is none."""
    if not 0 < megabytes <= MAX_BUCKET_MB:
        raise WorkbookError(
            f"--bucket-mb {megabytes:g}: a bucket's cap is a number of MiB above 0, such as 4, "
            f"and at most {MAX_BUCKET_MB}."
        )


def tick(metronome: str) -> float:
    """The seconds of `--metronome`."""
    try:
        return units.seconds(metronome)
    except WorkbookError as error:
        raise WorkbookError(f"--metronome {metronome}: {error}.") from error


def no_folder(option: str, name: str | None) -> None:
    """Refuse a folder without a name, which would be the current one."""
    if name is not None and not name.strip():
        raise WorkbookError(f"{option} has no value: name a folder.")


def unwritable(cluster: Cluster, option: str, name: str) -> None:
    """Refuse, on all ranks, a folder in which rank 0 cannot write. It is made if need be."""
    failure = ""
    if cluster.is_main:
        try:
            Path(name).mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=name).close()
        except OSError as error:
            why = error.strerror or error
            failure = f"{option} {name}: rank 0 cannot write there ({why}); name another folder."
    tell(cluster, option, failure)


def tell(cluster: Cluster, what: str, failure: str) -> None:
    """Rank 0 tells all how `what` went; all raise WorkbookError if it went wrong."""
    call = cluster.store.add(f"comm.refuse/{what}/{cluster.rank}", 1)
    key = f"comm.refuse/{what}/outcome/{call}"
    if cluster.is_main:
        cluster.store.set(key, failure)
    failure = cluster.store.get(key).decode()
    barrier()  # nobody raises, and ends, before all have read it
    if failure:
        raise WorkbookError(failure)
