import platform
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist

from lab.cluster import Cluster
from lab.launch.same_start import check_same_start

TEXT = torch.arange(200, dtype=torch.uint8)


def verdicts(
    data: list[torch.Tensor], arguments: dict[int, dict[str, Any]] | None = None, world_size: int = 4
) -> list[str]:
    """Return the error of check_same_start of each started rank, in rank order, or "" if there is none."""
    store = dist.HashStore()

    def one(rank: int) -> str:
        threading.current_thread().name = f"rank{rank}"
        cluster = Cluster(rank, world_size, rank, torch.device("cpu"), store)
        try:
            check_same_start(cluster, data[rank], arguments[rank] if arguments else {}, timeout=0.5)
        except RuntimeError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(one, range(len(data))))


def test_ranks_with_the_same_data_pass_and_others_are_named_with_their_python(monkeypatch):
    assert verdicts([TEXT] * 4) == [""] * 4
    pythons = {"rank2": "3.12.1", "rank3": "3.12.1"}
    monkeypatch.setattr(
        platform, "python_version", lambda: pythons.get(threading.current_thread().name, "3.11.7")
    )
    [error] = set(verdicts([TEXT, TEXT, TEXT.flip(0), TEXT.flip(0)]))
    assert "the training data of rank 2, 3 differs from rank 0's" in error
    assert "(3.11.7 on rank 0, 3.11.7 on rank 1, 3.12.1 on rank 2, 3.12.1 on rank 3)" in error


def test_a_rank_that_never_reports_is_named_to_the_others():
    start = time.monotonic()
    errors = verdicts([TEXT, TEXT], world_size=3)
    assert all("rank 2 sent no digest of its data within 0.5 s" in error for error in errors)
    assert time.monotonic() - start < 3
