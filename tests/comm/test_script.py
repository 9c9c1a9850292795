"""An error is printed once: by rank 0 if it has it too, else by the rank that has it."""

import dataclasses
import math
import platform
import sys
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from comm import point_to_point, tour
from comm.collectives import all_reduce
from comm.same_start import check_same_start
from comm.script import start
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.ranks import run_ranks
from tests.comm.places import places, started


@dataclasses.dataclass
class Args:
    """Add ones."""

    steps: int = 1


def main(cluster, args: Args) -> None:
    if args.steps < 1:
        raise WorkbookError(f"--steps {args.steps}: there must be at least one.")
    check_same_start(torch.ones(1), {"--steps": args.steps})
    all_reduce(torch.ones(args.steps))


def test_sizes_that_no_message_has_are_refused_in_a_sentence():
    cluster = Cluster(0, 2, 0, torch.device("cpu"), dist.HashStore())
    for size in (math.nan, 1e300, -1.0, 0.0):
        for script in (tour, point_to_point):
            with pytest.raises(WorkbookError, match=r"^--mb .*: choose a size from 0.00001 to 8192 MiB"):
                script.main(cluster, script.Args(mb=size))
    with pytest.raises(WorkbookError, match=r"^--repeats 0: choose a number from 1 to 1000"):
        tour.main(cluster, tour.Args(repeats=0))


def outcome(capfd, *command_lines: str, **variables: object) -> tuple[list[str], str, str]:
    """Start a script's ranks with these command lines; return their exit codes and output."""

    def run(cluster) -> str:
        sys.argv = ["script.py", *command_lines[cluster.rank].split()]
        start(main, Args)
        return "ended well"

    n = len(command_lines)
    results = started(run, places(list(range(n)), n, **variables))
    out, err = capfd.readouterr()
    said = [line for line in err.splitlines() if ": here as" not in line and "ranks have met" not in line]
    return [str(result) for result in results], out, "\n".join(said)


def test_a_wrong_command_line_is_reported_by_rank_0_before_the_ranks_meet(capfd):
    ends, out, err = outcome(capfd, *["--stpes 3"] * 3, NODES=3, MASTER_ADDR="192.0.2.1")
    assert ends[0].endswith("SystemExit: 2\n") and ends[1:] == ["ended well"] * 2
    assert not out and err.startswith("[rank 0] There is no option --stpes: did you mean --steps? (")
    assert err.count("\n") == 0


def test_an_error_of_all_ranks_is_reported_once(capfd):
    ends, _, err = outcome(capfd, *["--steps 0"] * 3)
    assert ends == [f"rank {rank} exited with code 1 before it returned." for rank in range(3)]
    assert err == "[rank 0] rank 0: --steps 0: there must be at least one."


def test_each_rank_says_how_they_were_started_differently(capfd):
    ends, _, err = outcome(capfd, "--steps 1", "--steps 2")
    assert ends == [f"rank {rank} exited with code 1 before it returned." for rank in range(2)]
    said = "--steps is 1 on rank 0 and 2 on rank 1: start all ranks with the same arguments"
    assert sorted(err.splitlines()) == [f"[rank {rank}] rank {rank}: {said}" for rank in range(2)]


def test_an_error_of_one_rank_is_reported_by_it_and_the_others_name_it(capfd):
    ends, _, err = outcome(capfd, "", "", "--steps 0")
    assert ends == [f"rank {rank} exited with code 1 before it returned." for rank in range(3)]
    assert "[rank 2] rank 2: --steps 0: there must be at least one." in err
    for rank in (0, 1):
        [sentence] = [line for line in err.splitlines() if line.startswith(f"[rank {rank}]")]
        assert sentence.endswith("rank 2 has failed: --steps 0: there must be at least one.")


TEXT = torch.arange(200, dtype=torch.uint8)


def test_ranks_with_the_same_data_pass_and_others_are_named_with_their_python():
    def check(cluster: Cluster) -> None:
        check_same_start(TEXT, {"--seed": 0})
        is_old = cluster.rank < 2
        with mock.patch.object(platform, "python_version", lambda: "3.11.7" if is_old else "3.12.1"):
            check_same_start(TEXT if is_old else TEXT.flip(0), {})

    for error in run_ranks(check, 4, collect_failures=True):
        assert "the training data of rank 2, 3 differs from rank 0's" in str(error)
        assert "(3.11.7 on rank 0, 3.11.7 on rank 1, 3.12.1 on rank 2, 3.12.1 on rank 3)" in str(error)
