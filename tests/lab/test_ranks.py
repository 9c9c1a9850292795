"""Processes that stand in for machines: results, errors, hangs, output, and nothing left behind."""

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import suppress
from pathlib import Path

import nbformat
import pytest
import torch
import torch.distributed as dist
from nbclient import NotebookClient

from lab import ranks
from lab.ranks import RankError, run_ranks


def test_results_come_in_rank_order_and_arguments_arrive():
    def work(cluster, base: int, table: dict) -> tuple:
        time.sleep(0.05 * (cluster.world_size - cluster.rank))  # the last rank is done first
        return cluster.rank, cluster.world_size, base + table["more"]

    assert run_ranks(work, 4, 10, {"more": 5}) == [(rank, 4, 15) for rank in range(4)]


def test_ranks_form_a_group_and_share_a_store():
    def work(cluster) -> float:
        assert dist.get_backend() == "gloo" and dist.get_world_size() == cluster.world_size
        assert cluster.device == torch.device("cpu") and cluster.is_main == (cluster.rank == 0)
        cluster.store.set(f"hello from {cluster.rank}", "")
        cluster.store.wait([f"hello from {rank}" for rank in range(cluster.world_size)])
        total = torch.tensor(float(cluster.rank))
        dist.all_reduce(total)
        return total.item()

    assert run_ranks(work, 3) == [3.0] * 3


def test_closures_lambdas_and_tensors_travel_both_ways():
    factor = torch.tensor([2.0, 3.0])

    def scaled(cluster) -> torch.Tensor:
        return factor * cluster.rank

    got = run_ranks(scaled, 2)
    assert torch.equal(got[1], factor) and torch.equal(got[0], torch.zeros(2))
    assert run_ranks(lambda cluster: cluster.rank**2, 3) == [0, 1, 4]


def test_ranks_may_start_without_a_group():
    def work(cluster) -> bool:
        return dist.is_initialized()

    assert run_ranks(work, 2, backend=None) == [False, False]


def test_a_rank_uses_one_thread_for_its_arithmetic():
    assert run_ranks(lambda cluster: torch.get_num_threads(), 2) == [1, 1]


def test_a_world_of_no_ranks_is_refused():
    with pytest.raises(ValueError, match="world_size must be at least 1, not 0"):
        run_ranks(print, 0)


def test_timeouts_that_no_clock_can_count_are_refused():
    for seconds in (0, -1.0, float("inf"), float("nan"), 1e300):
        for name in ("timeout", "group_timeout"):
            with pytest.raises(ValueError, match=rf"^{name} must be a number of seconds above 0 and at most"):
                run_ranks(print, 1, **{name: seconds})


def test_the_traceback_of_the_rank_that_failed_first_has_its_source_line(monkeypatch):
    monkeypatch.setattr(ranks, "_GRACE", 10.0)  # until all have failed, however slow this machine is

    def work(cluster) -> None:
        if cluster.rank == 2:
            cluster.store.wait(["rank 1 fails"])
            time.sleep(0.1)
            raise KeyError("a consequence")
        if cluster.rank == 1:
            cluster.store.set("rank 1 fails", "")
            raise ValueError("the cause")  # here it begins
        dist.barrier()

    with pytest.raises(RankError) as error:
        run_ranks(work, 3)
    text = str(error.value)
    assert error.value.rank == 1
    assert text.startswith("rank 1 failed:")
    assert 'raise ValueError("the cause")  # here it begins' in text and "test_ranks.py" in text
    assert "rank_child.py" not in text
    assert re.search(r"Afterwards also: .*rank 2 failed: KeyError: 'a consequence'", text)


def test_the_cause_of_a_cause_is_told_too():
    def work(cluster) -> None:
        try:
            torch.ones(2) @ torch.ones(3)
        except RuntimeError as error:
            raise ValueError("shapes") from error

    with pytest.raises(
        RankError, match=r"inconsistent tensor size[\s\S]*direct cause[\s\S]*ValueError: shapes"
    ):
        run_ranks(work, 1)


def test_a_killed_rank_is_named_with_its_signal_and_so_is_one_that_exits():
    def killed(cluster) -> None:
        if cluster.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    def leaves(cluster) -> None:
        if cluster.rank == 1:
            os._exit(3)
        dist.barrier()

    with pytest.raises(RankError, match="rank 1 was killed by SIGKILL before it returned") as error:
        run_ranks(killed, 3)
    assert error.value.rank == 1
    with pytest.raises(RankError, match="rank 1 exited with code 3 before it returned"):
        run_ranks(leaves, 3)


def test_a_call_of_sys_exit_is_a_failure_and_not_a_hang():
    with pytest.raises(RankError, match=r"rank 0 failed:[\s\S]*SystemExit: 4"):
        run_ranks(lambda cluster: sys.exit(4), 1)


def test_failures_can_be_collected_instead():
    def work(cluster) -> str:
        if cluster.rank == 0:
            raise ValueError("only here")
        return "fine"

    first, *others = run_ranks(work, 3, collect_failures=True)
    assert isinstance(first, RankError) and first.rank == 0 and "only here" in str(first)
    assert others == ["fine", "fine"]


def test_a_result_that_cannot_be_sent_is_a_failure_of_that_rank():
    with pytest.raises(RankError, match=r"rank 0 failed:[\s\S]*cannot pickle"):
        run_ranks(lambda cluster: (number for number in range(3)), 1)


def test_a_hang_is_reported_with_the_line_where_each_rank_is_stuck_and_ends_them_all(monkeypatch, tmp_path):
    def work(cluster) -> None:
        (tmp_path / str(cluster.rank)).write_text(str(os.getpid()))
        if cluster.rank == 0:
            dist.barrier()  # nobody else comes
        elif cluster.rank == 1:
            time.sleep(60)  # overslept
        elif cluster.rank == 3:
            while True:  # busy
                pass

    monkeypatch.setattr(ranks, "_GRACE", 0.5)  # for a slow machine
    with pytest.raises(RankError) as error:
        run_ranks(work, 4, timeout=1.5)
    text = str(error.value)
    assert text.startswith("no answer within 1.5 s.")
    assert re.search(r"rank 0 is stuck at \S+test_ranks\.py:\d+ in work: .*nobody else comes", text)
    assert re.search(r"rank 1 is stuck at \S+test_ranks\.py:\d+ in work: .*overslept", text)
    assert "rank 2 has finished" in text
    assert re.search(r"rank 3 is stuck at \S+test_ranks\.py:\d+ in work: (while True|pass)", text)
    assert not [path for path in tmp_path.iterdir() if is_alive(int(path.read_text()))]


def test_after_a_failure_no_rank_is_alive(tmp_path):
    def work(cluster) -> None:
        (tmp_path / str(cluster.rank)).write_text(str(os.getpid()))
        dist.barrier()
        if cluster.rank == 0:
            raise ValueError
        time.sleep(60)

    with pytest.raises(RankError, match="ValueError"):
        run_ranks(work, 3)
    pids = [int(path.read_text()) for path in tmp_path.iterdir()]
    assert len(pids) == 3 and not any(is_alive(pid) for pid in pids)


def test_output_is_tagged_by_rank_line_by_line(capfd):
    def work(cluster) -> None:
        print(f"one from {cluster.rank}\ntwo from {cluster.rank}")
        print("no end of line", end="", flush=True)
        print(f"an error from {cluster.rank}", file=sys.stderr)
        os.write(1, b" and past Python\n")

    run_ranks(work, 2)
    out, err = capfd.readouterr()
    for rank in (0, 1):
        mine = [line for line in out.splitlines() if line.startswith(f"[rank {rank}] ")]
        assert mine == [
            f"[rank {rank}] one from {rank}",
            f"[rank {rank}] two from {rank}",
            f"[rank {rank}] no end of line and past Python",
        ]
        assert f"[rank {rank}] an error from {rank}\n" in err
    assert len(out.splitlines()) == 6


def test_everything_a_failing_rank_has_printed_is_shown(capfd):
    def work(cluster) -> None:
        for number in range(2000):
            print(number)
        print("last words", end="")
        raise ValueError

    with pytest.raises(RankError):
        run_ranks(work, 1)
    lines = capfd.readouterr().out.splitlines()
    assert lines == [f"[rank 0] {number}" for number in range(2000)] + ["[rank 0] last words"]


def test_a_large_result_and_many_calls_are_no_problem():
    def work(cluster) -> torch.Tensor:
        return torch.full((1_000_000,), float(cluster.rank))

    assert [float(result.sum()) for result in run_ranks(work, 2)] == [0.0, 1e6]
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    for number in range(10):
        assert run_ranks(lambda cluster, n: n, 2, number) == [number] * 2
    after = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    assert after <= before + 2, "file descriptors are left open"


def test_four_ranks_start_warm(capsys):
    run_ranks(lambda cluster: None, 1)
    start = time.perf_counter()
    run_ranks(lambda cluster: None, 4)
    seconds = time.perf_counter() - start
    with capsys.disabled():
        print(f" [4 warm ranks in {seconds:.2f} s] ", end="")
    assert seconds < 5  # a start that imports torch again in every rank takes longer


SLEEPERS = """
import os, time
from pathlib import Path
from lab.ranks import run_ranks

print("the script runs")

class Point:
    def __init__(self, x):
        self.x = x

def move(cluster, point):
    return Point(point.x + cluster.rank)

def sleep(cluster):
    Path(os.environ["PIDS"], str(cluster.rank)).write_text(str(os.getpid()))
    time.sleep(60)

print([point.x for point in run_ranks(move, 3, Point(10))], flush=True)
run_ranks(sleep, 3)
"""


def what_they_do(pids: list[int]) -> str:
    """Return the command line and, of each thread, the state and where in the kernel it waits."""
    lines = []
    for pid in pids:
        with suppress(OSError):
            folder = Path("/proc", str(pid))
            lines.append(f"{pid}: {(folder / 'cmdline').read_bytes().replace(bytes(1), b' ').decode()}")
            for task in (folder / "task").iterdir():
                state = (task / "stat").read_text().rpartition(")")[2].split()[0]
                lines.append(f"  thread {task.name}: {state} in {(task / 'wchan').read_text()}")
    return "\n".join(lines)


def test_nothing_is_left_behind_after_ctrl_c_or_when_the_parent_is_killed(tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("t")  # short: a Unix socket's name has at most 107 characters
    script = tmp_path / "sleepers.py"
    script.write_text(SLEEPERS)
    runs = {}
    for name in ("SIGINT", "SIGKILL"):
        for folder in ("pids", "tmp"):
            (tmp_path / name / folder).mkdir(parents=True)
        environment = os.environ | {
            "PIDS": str(tmp_path / name / "pids"),
            "TMPDIR": str(tmp_path / name / "tmp"),
            "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "torch"),  # importing torch makes one
        }
        runs[name] = subprocess.Popen(
            [sys.executable, str(script)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            # In the background of a script Ctrl-C is ignored, and would be here, too.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
    try:
        for name, process in runs.items():
            pids_folder = tmp_path / name / "pids"
            asleep = wait_until(lambda: all_numbers(pids_folder, 3) and process.poll() is None, 60)
            assert asleep, process.communicate(timeout=5)
            pids = [int(path.read_text()) for path in pids_folder.iterdir()]
            assert all(is_alive(pid) for pid in pids)
            if name == "SIGINT":
                os.killpg(process.pid, signal.SIGINT)  # as a terminal does it: to all in the foreground
            else:
                process.kill()
            try:
                output, error = process.communicate(timeout=20)
            except subprocess.TimeoutExpired:
                pytest.fail(
                    f"after {name} a process still holds the output: {what_they_do(session(process.pid))}"
                )
            # No process has run the script again to find its classes, though its main is not guarded.
            assert output.splitlines() == ["the script runs", "[10, 11, 12]"]
            orphans = lambda: [pid for pid in {*pids, *session(process.pid)} if is_alive(pid)]  # noqa: E731
            assert wait_until(lambda: not orphans(), 10), f"after {name} are left: {orphans()}"
            left_over = lambda: list((tmp_path / name / "tmp").glob("ranks-*"))  # noqa: E731
            assert wait_until(lambda: not left_over(), 5), f"after {name} is left: {left_over()}"
            if name == "SIGINT":
                assert "KeyboardInterrupt" in error
                assert list((tmp_path / name / "tmp").iterdir()) == []
    finally:
        for process in runs.values():
            process.kill()
            process.wait()


def test_a_notebook_cell_is_run_in_every_rank_beside_jupyters_own_comm_package():
    cells = [
        # Jupyter's kernel has a package called comm too: both must work.
        "from comm import collectives\nimport torch\nfrom lab.ranks import run_ranks",
        """
        def add_up(cluster):
            x = torch.tensor([float(cluster.rank)])
            collectives.all_reduce(x)
            print("the sum is", x.item())
            return x.item()

        run_ranks(add_up, 3)
        """,
        """
        def divide(cluster):
            return 1 / cluster.rank  # rank 0 cannot

        try:
            run_ranks(divide, 2)
        except RuntimeError as error:
            print(error)
        """,
        "from comm import create_comm, base_comm\nprint(get_ipython().kernel.comm_manager is not None)",
    ]
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(textwrap.dedent(cell).strip()) for cell in cells]
    )
    NotebookClient(notebook, timeout=60, kernel_name="python3").execute()
    _, summed, failed, both = [cell.outputs for cell in notebook.cells]
    printed = "".join(output.text for output in summed if output.output_type == "stream")
    for rank in range(3):
        assert re.search(rf"\[rank {rank}\]\S* the sum is 3\.0", printed)
    assert summed[-1].data["text/plain"] == "[3.0, 3.0, 3.0]"
    assert "return 1 / cluster.rank  # rank 0 cannot" in failed[0].text
    assert "ZeroDivisionError" in failed[0].text
    assert both[0].text.strip() == "True"


def is_alive(pid: int) -> bool:
    """Return False for a zombie too: it only waits for its exit code to be read."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except ProcessLookupError:
        return False
    except OSError:
        return not os.path.isdir("/proc/self")


def session(leader: int) -> list[int]:
    """Return all processes of a session, multiprocessing's helpers among them; none without /proc."""
    members = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[3]) == leader:
                members.append(int(stat.parent.name))
    return members


def all_numbers(folder: Path, how_many: int) -> bool:
    return sum(path.read_text().isdecimal() for path in folder.iterdir()) == how_many


def wait_until(condition, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def test_a_rank_that_is_done_stays_until_its_peers_are():
    def work(cluster) -> float:
        x = torch.full((1000,), 7.0)
        if cluster.rank == 0:
            sys.modules["under_way"] = (dist.isend(x, 1), x)  # kept, not waited for
            return 0.0
        time.sleep(0.5)
        x.zero_()
        dist.recv(x, 0)
        return x[-1].item()

    assert run_ranks(work, 2, group_timeout=5) == [0.0, 7.0]
