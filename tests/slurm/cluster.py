"""Start a Slurm cluster of two machines on this one, as plain processes with files in a temporary folder."""

import getpass
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "squeue")
PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])  # where Debian has the daemons

# Both machines are this one. A job in `high` takes the machines from the jobs in `low`, which are requeued.
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=30
NodeName=n[0-1] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{ports[1]}-{ports[2]}] CPUs=1
PartitionName=low Nodes=ALL Default=YES PriorityTier=1
PartitionName=high Nodes=ALL PriorityTier=10
"""


class CannotStart(Exception):
    """Say why there is no Slurm cluster here."""


class SlurmCluster:
    """A cluster of the machines n0 and n1, which runs in a `with` block."""

    def __enter__(self) -> "SlurmCluster":
        if missing := [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]:
            raise CannotStart(f"there is no {missing[0]} (Debian: apt-get install slurm-wlm)")
        with ExitStack() as stack:
            self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slurm-")))
            self._write_files()
            self._daemons: list[subprocess.Popen] = []
            stack.callback(self._stop)
            self._start()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _write_files(self) -> None:
        self.folder.chmod(0o755)  # munge's programs look into it
        key = self.folder / "munge" / "key"
        key.parent.mkdir(mode=0o700)
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        (self.folder / "state").mkdir()
        self._configuration = self.folder / "slurm.conf"
        values = {"host": socket.gethostname().partition(".")[0], "user": getpass.getuser()}
        self._configuration.write_text(
            CONFIGURATION.format(folder=self.folder, ports=three_free_ports(), **values)
        )

    def _start(self) -> None:
        munge = self.folder / "munge"
        self._start_daemon(
            "munged", "--foreground", "--force", f"--key-file={munge}/key",
            f"--socket={self.folder}/munge.sock", f"--pid-file={munge}/pid", f"--seed-file={munge}/seed",
            f"--log-file={munge}/log",
        )  # fmt: skip
        self._await_start("munged", (self.folder / "munge.sock").exists)
        self._start_daemon("slurmctld", "-D", "-f", str(self._configuration))
        for node in ("n0", "n1"):
            self._start_daemon("slurmd", "-D", "-f", str(self._configuration), "-N", node)
        self._await_start("slurmd", lambda: self.call("sinfo", "-h", "-o", "%T", check=False) == "idle")

    def _start_daemon(self, name: str, *arguments: str) -> None:
        program = shutil.which(name, path=PATH)
        assert program is not None
        with (self.folder / "daemons.log").open("a") as log:
            daemon = subprocess.Popen(
                [program, *arguments], stdout=log, stderr=log, env=self._environment({})
            )
        self._daemons.append(daemon)

    def _await_start(self, what: str, has_started: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 30
        while not has_started():
            if time.monotonic() > deadline or any(daemon.poll() is not None for daemon in self._daemons):
                errors = [line for line in self._log().splitlines() if "rror" in line] or [
                    "it does not answer"
                ]
                raise CannotStart(f"{what} cannot start here: {errors[-1]}")
            time.sleep(0.1)

    def _log(self) -> str:
        return (self.folder / "daemons.log").read_text()

    def _stop(self) -> None:
        if len(self._daemons) > 1:
            self.call("scancel", "--user", getpass.getuser(), check=False)
            self.wait(lambda: not self.call("squeue", "-h", check=False), 60)
        for daemon in reversed(self._daemons):
            daemon.send_signal(signal.SIGTERM)
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def _environment(self, changes: dict[str, str]) -> dict[str, str]:
        clean = {
            name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH"))
        }
        return clean | {"PATH": PATH, "SLURM_CONF": str(self._configuration)} | changes

    def call(self, *command: str, check: bool = True, **env: str) -> str:
        """Run a command of Slurm, and return what it prints."""
        done = subprocess.run(
            command, cwd=ROOT, env=self._environment(env), capture_output=True, text=True, timeout=60
        )
        assert not check or done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout.strip()

    def wait(self, condition: Callable[[], object], seconds: float) -> bool:
        """Return whether the condition has become true within this time."""
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)
        return True


def three_free_ports() -> list[int]:
    """Return one free port and two neighbours that are free."""
    while True:
        with ExitStack() as stack:
            sockets = [stack.enter_context(socket.socket()) for _ in range(3)]
            sockets[0].bind(("127.0.0.1", 0))
            sockets[1].bind(("127.0.0.1", 0))
            second = sockets[1].getsockname()[1]
            try:
                sockets[2].bind(("127.0.0.1", second + 1))
            except (OSError, OverflowError):
                continue
            return [sockets[0].getsockname()[1], second, second + 1]


def processes_of(text: str) -> dict[int, str]:
    """Return the processes whose command line contains `text`."""
    found = {}
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = file.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue  # it has ended
        if text in line:
            found[int(file.parent.name)] = line
    return found


def last_step(output: str) -> int:
    """Return the last step that a job has printed; 0 if there is none."""
    return max(map(int, re.findall(r"  step (\d+)/\d+  loss", output)), default=0)
