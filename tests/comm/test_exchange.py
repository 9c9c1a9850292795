"""Every rank learns what the others have, and an error of one rank is an error of all."""

import pickle
import tempfile
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from comm.cost import Link
from comm.exchange import exchange, on_all, on_main
from comm.wire import slow_link
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.ranks import run_ranks


def test_every_rank_learns_what_each_rank_found_and_what_rank_0_alone_found():
    def work(cluster: Cluster) -> tuple[list[int], int]:
        return on_all("count", lambda: cluster.rank), on_main(cluster, "count", lambda: cluster.rank + 7)

    assert run_ranks(work, 3) == [([0, 1, 2], 7)] * 3


@pytest.mark.parametrize("failing", [0, 2])
def test_what_the_system_refuses_one_rank_is_every_ranks_error_in_a_sentence(failing, tmp_path):
    def work(cluster: Cluster) -> str:
        def action() -> None:
            if cluster.rank == failing:
                (tmp_path / "missing").read_bytes()

        with pytest.raises(WorkbookError) as caught:
            on_all("read it", action)
        return str(caught.value)

    assert run_ranks(work, 3) == [f"cannot read it: No such file or directory ({tmp_path / 'missing'})"] * 3


def test_a_bug_of_one_rank_keeps_its_class_there_and_ends_the_others_too():
    def work(cluster: Cluster) -> str:
        with pytest.raises((KeyError, WorkbookError)) as caught:
            on_main(cluster, "look it up", lambda: {}["name"])
        return type(caught.value).__name__

    assert run_ranks(work, 2) == ["KeyError", "WorkbookError"]


def test_values_of_any_size_and_kind_arrive_in_rank_order():
    def work(cluster: Cluster) -> None:
        rank, n = cluster.rank, cluster.world_size
        assert exchange(rank / 3) == [r / 3 for r in range(n)]
        assert exchange("word" * 1000 * rank) == ["word" * 1000 * r for r in range(n)]
        assert exchange({"of": (rank, None, [b"bytes"])}) == [{"of": (r, None, [b"bytes"])} for r in range(n)]
        assert [t.tolist() for t in exchange(torch.arange(rank))] == [list(range(r)) for r in range(n)]

    run_ranks(work, 3)


def test_a_part_of_the_ranks_exchanges_among_itself_and_a_slow_link_does_not_slow_it_down():
    def work(cluster: Cluster) -> list[int] | None:
        some = dist.new_group([0, 2])
        start = time.monotonic()
        with slow_link.slowed(Link(2.0, 0.0)):
            found = None if cluster.rank == 1 else exchange(10 * cluster.rank, some)
        assert time.monotonic() - start < 2
        return found

    assert run_ranks(work, 3) == [[0, 20], None, [0, 20]]


class Opener:
    """Writes itself as a call of `open`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return open, (str(self.path), "w")


def test_a_value_that_would_run_code_when_it_is_read_is_refused_and_does_not():
    with tempfile.TemporaryDirectory() as folder:
        opened = Path(folder) / "opened"

        def work(cluster: Cluster) -> None:
            with pytest.raises(pickle.UnpicklingError):
                exchange(Opener(opened))

        run_ranks(work, 2)
        assert not opened.exists()
