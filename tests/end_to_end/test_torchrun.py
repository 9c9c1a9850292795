"""The launcher of `make run` is closed to the network, prints no traceback, and leaves no rank behind."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.comm.places import free_port
from tests.processes import is_alive
from tests.run_modes import ROOT, python, start_python

LAUNCH = ["-m", "lab.launch.torchrun", "--nproc-per-node=2"]

FAILS = """
import os, sys, time
if os.environ["RANK"] == "1":
    sys.exit("rank 1: this machine has no such thing.")
time.sleep(60)
"""

# Like a rank inside gloo, these ranks do not notice Ctrl-C.
STUCK = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
open(os.path.join(sys.argv[1], os.environ["RANK"]), "w").write(str(os.getpid()))
time.sleep(60)
"""


# Each rank is started, begins when it may, and ends when it is asked to stop.
STOPS = """
import os, sys, time
from pathlib import Path
from lab.launch.interrupt import StopRequest

folder = Path(sys.argv[1])
(folder / os.environ["RANK"]).write_text(str(os.getpid()))
while not (folder / "begin").exists():
    time.sleep(0.01)
with StopRequest() as stop:
    deadline = time.monotonic() + 20
    while not stop.requested and time.monotonic() < deadline:
        time.sleep(0.01)
time.sleep(0.5)  # the other rank must be asked, too
sys.exit(stop.exit_code)
"""

# Rank 0 waits in a collective for rank 1, which does not come.
TRAINS = """
import os, sys, time
import torch.distributed as dist
from comm.script import joined

with joined() as cluster:
    dist.barrier()
    open(os.path.join(sys.argv[1], os.environ["RANK"]), "w").write(str(os.getpid()))
    time.sleep(60 * cluster.rank)
    dist.barrier()
"""

# Rank 1 crashes once; then rank 0 lists what the launcher and both ranks listen on, and what Python bound.
LISTENS = """
import json, os, socket, sys
bound = []
def watch(event, args):
    if event == "socket.bind" and args[0].family != socket.AF_UNIX:
        bound.append(args[1])
sys.addaudithook(watch)
import torch
import torch.distributed as dist
from comm.collectives import all_reduce
from comm.script import joined
from tests.processes import family, listening

with joined() as cluster:
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and cluster.rank == 1:
        os._exit(7)
    for pattern in ("torch", "ring", "pipelined_ring"):
        total = torch.ones(100_000)
        all_reduce(total, pattern=pattern)
        assert total[0] == 2
    if cluster.is_main:
        found = listening(*family(os.getppid()))
        print(json.dumps({"listening": found, "bound": bound, "port": int(os.environ["MASTER_PORT"])}))
    dist.barrier()  # until then rank 1 listens, too
"""


def launch(folder: Path, text: str, *options: str) -> subprocess.Popen[str]:
    script = folder / "script.py"
    script.write_text(text)
    (folder / "tmp").mkdir()
    env = os.environ | {"TMPDIR": str(folder / "tmp"), "PYTHONPATH": str(ROOT)}
    return start_python(*LAUNCH, *options, script, folder, env=env)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux lists the sockets in /proc")
def test_a_run_listens_on_the_loopback_only_is_restarted_and_leaves_no_file(tmp_path):
    with launch(tmp_path, LISTENS, "--max-restarts=1") as torchrun:
        out, err = torchrun.communicate(timeout=60)
    assert torchrun.returncode == 0, err
    found = json.loads(out)
    assert found["port"] in [port for _, port in found["listening"]]
    assert len(found["listening"]) >= 3, "the store, and gloo in each rank"
    assert {address for address, _ in found["listening"]} == {"127.0.0.1"}
    assert found["bound"] and all(where[0] == "127.0.0.1" for where in found["bound"])
    assert list((tmp_path / "tmp").iterdir()) == []


def test_the_error_of_a_failing_rank_is_the_only_line(tmp_path):
    with launch(tmp_path, FAILS) as torchrun:
        _, err = torchrun.communicate(timeout=40)
    assert torchrun.returncode == 1
    assert err == "rank 1: this machine has no such thing.\n"


def pids_of_ranks(folder: Path) -> list[int]:
    """Return the ids that both ranks have written, once they have."""
    files = [folder / "0", folder / "1"]
    deadline = time.monotonic() + 40
    while not all(file.exists() and file.read_text() for file in files):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return [int(file.read_text()) for file in files]


def test_ranks_whose_launcher_is_killed_end_with_a_sentence(tmp_path):
    with launch(tmp_path, TRAINS) as torchrun:
        try:
            pids_of_ranks(tmp_path)
        finally:
            torchrun.kill()
        _, err = torchrun.communicate(timeout=10)  # returns when the ranks, which share the pipe, have ended
    said = f"the launcher (process {torchrun.pid}) has died, so this rank ends."
    last_words = [line for line in err.splitlines() if " of 2: " not in line]
    assert sorted(last_words) == [f"rank 0: {said}", f"rank 1: {said}"]


@pytest.mark.parametrize("is_early", [True, False])
def test_sigusr1_reaches_all_ranks_whose_exit_code_becomes_the_launchers(tmp_path, is_early):
    with launch(tmp_path, STOPS) as torchrun:
        try:
            pids_of_ranks(tmp_path)
            if not is_early:
                (tmp_path / "begin").touch()
                time.sleep(0.2)
            torchrun.send_signal(signal.SIGUSR1)
            time.sleep(0.2)
            (tmp_path / "begin").touch()
            _, err = torchrun.communicate(timeout=20)
        finally:
            torchrun.kill()
    assert torchrun.returncode == 75
    notice = "stopping after this step, because the scheduler asks for it"
    assert [line for line in err.splitlines() if line] == [notice, notice]


def test_a_machine_that_does_not_reach_the_first_one_says_so_in_a_sentence():
    port = free_port()
    options = ["--nnodes=2", "--node-rank=1", "--rdzv-backend=static", f"--rdzv-endpoint=127.0.0.1:{port}"]
    done = python(*LAUNCH, *options, "--rdzv-conf=timeout=1", "no_such_script.py")
    assert (done.returncode, done.stdout) == (1, "")
    assert "Traceback" not in done.stderr
    sentence = rf"The machines do not meet \(.*127.0.0.1, {port}\)\); start all of them with .*"
    assert re.fullmatch(sentence, done.stderr.splitlines()[-1])


@pytest.mark.parametrize("times", [1, 3])
def test_ctrl_c_leaves_no_process_behind(tmp_path, times):
    with launch(tmp_path, STUCK) as torchrun:
        try:
            pids = pids_of_ranks(tmp_path)
            for _ in range(times):
                torchrun.send_signal(signal.SIGINT)
                time.sleep(0.05)
            _, err = torchrun.communicate(timeout=10)
        finally:
            torchrun.kill()
    assert torchrun.returncode != 0
    assert err.splitlines() == ["stopped all ranks."]
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_ranks_under_nohup_stay_after_their_terminal_has_closed(tmp_path):
    (script := tmp_path / "script.py").write_text(STUCK)
    command = ["nohup", sys.executable, *LAUNCH, script, tmp_path]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, start_new_session=True) as launcher:
        try:
            pids = pids_of_ranks(tmp_path)
            os.killpg(launcher.pid, signal.SIGHUP)  # as a terminal does it that closes
            time.sleep(1)
            assert launcher.poll() is None and all(is_alive(pid) for pid in pids)
        finally:
            launcher.terminate()


def test_ctrl_c_at_the_launcher_of_a_training_lets_the_ranks_save(tmp_path):
    folder = tmp_path / "run"
    command = [*LAUNCH, "data_parallel/train_naive.py", "--size", "tiny", "--steps", "100000"]
    with start_python(*command, "--checkpoint", folder) as torchrun:
        try:
            assert torchrun.stdout is not None
            assert any("step 1/100000" in line for line in torchrun.stdout)
            torchrun.send_signal(signal.SIGINT)
            _, said = torchrun.communicate(timeout=30)  # until the ranks, which share the pipe, have ended
        finally:
            torchrun.kill()
    assert torchrun.returncode > 0 and "Traceback" not in said
    [step] = set(re.findall(r"^rank [01]: stopped after step (\d+) of 100000;", said, re.MULTILINE))
    assert os.listdir(folder) == [f"step-{step}"]
