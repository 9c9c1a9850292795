"""Train, kill rank 1 in the middle, and note when each thing happens: the runs of benchmarks/elastic.py."""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from comm.errors import CommError
from comm.script import command_line, start
from hybrid_parallel import train_hybrid
from hybrid_parallel.arguments import HybridArgs
from hybrid_parallel.elastic import train_elastic, train_elastic_mesh
from hybrid_parallel.elastic.survivors import Survivors
from hybrid_parallel.elastic.train_elastic import ElasticArgs, ElasticReplica
from hybrid_parallel.elastic.train_elastic_mesh import ElasticMeshArgs
from lab.cluster import Cluster
from training.checkpoint import complete_steps
from training.run import Run

KILL_AT, EVERY = 15, 10  # steps: half of the steps between two checkpoints is lost
EVENTS, WAY = "ELASTIC_EVENTS", "ELASTIC_WAY"  # variables with the name of the file, and the way to go on


def note(event: str, step: int = -1) -> None:
    """Write an event and the time to the file of events; lines of several processes do not mix."""
    with open(os.environ[EVENTS], "a") as file:
        file.write(json.dumps({"event": event, "step": step, "time": time.time()}) + "\n")


def die() -> None:
    note("killed")
    os.kill(os.getpid(), signal.SIGKILL)


def has_died() -> bool:
    """Return whether a rank has died before, perhaps in an earlier attempt."""
    return '"killed"' in Path(os.environ[EVENTS]).read_text()


def noting(
    owner: Any, name: str, before: Callable[..., None] | None, after: Callable[..., None] | None
) -> None:
    """Replace a method by one that calls `before` and `after`, with the object, around it."""
    original = getattr(owner, name)

    def replaced(self: Any, *args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before(self, *args)
        result = original(self, *args, **kwargs)
        if after is not None:
            after(self, *args)
        return result

    setattr(owner, name, replaced)


def restart(cluster: Cluster, args: HybridArgs) -> None:
    """Train as train_hybrid.py does; torchrun or the Docker engine starts the ranks again."""
    note(f"met {cluster.rank}")
    is_first = not has_died()

    def before_batch(run: Run, step: int) -> None:
        if is_first and cluster.rank == 1 and step == KILL_AT and run._meter is not None:
            _wait_for_a_checkpoint(args)
            die()

    noting(Run, "batch", before_batch, None)
    noting(Run, "_load", None, lambda run: note(f"restored {cluster.rank}"))
    noting(Run, "save_if_due", lambda run, step: note(f"step {cluster.rank}", step), None)
    try:
        train_hybrid.main(cluster, args)
    except CommError:
        note(f"noticed {cluster.rank}")
        raise


def survive(cluster: Cluster, args: ElasticArgs) -> None:
    """Train as train_elastic.py does."""
    rank = cluster.rank

    def before_step(replica: ElasticReplica, *_: Any) -> None:
        if rank == 1 and replica.steps == KILL_AT:
            die()

    def after_step(replica: ElasticReplica, *_: Any) -> None:
        note(f"step {rank}", replica.steps - 1)

    noting(ElasticReplica, "step", before_step, after_step)
    noting(Survivors, "regroup", lambda _: note(f"noticed {rank}"), lambda _: note(f"met {rank}"))
    noting(ElasticReplica, "catch_up", None, lambda _: note(f"restored {rank}"))
    train_elastic.main(cluster, args)


def survive_on_a_mesh(cluster: Cluster, args: ElasticMeshArgs) -> None:
    """Train as train_elastic_mesh.py does."""
    rank = cluster.rank

    def before_batch(run: Run, step: int) -> None:
        if rank == 1 and step == KILL_AT and run._meter is not None:
            _wait_for_a_checkpoint(args)
            die()

    noting(Run, "batch", before_batch, None)
    noting(Run, "_load", None, lambda run: note(f"restored {rank}"))
    noting(Run, "save_if_due", lambda run, step: note(f"step {rank}", step), None)
    noting(Survivors, "regroup", lambda _: note(f"noticed {rank}"), lambda _: note(f"met {rank}"))
    train_elastic_mesh.main(cluster, args)


def _wait_for_a_checkpoint(args: HybridArgs) -> None:
    while not complete_steps(Path(str(args.checkpoint))):
        time.sleep(0.01)


if __name__ == "__main__":
    if os.environ[WAY] == "survivors":
        start(survive, ElasticArgs, in_a_child=True)
    elif os.environ[WAY] == "mesh":
        start(survive_on_a_mesh, ElasticMeshArgs, in_a_child=True)
    else:
        start(restart, HybridArgs, read=lambda words, cluster: command_line(HybridArgs))
