"""A job of scripts/slurm.sbatch continues after preemption and its time limit, and leaves nothing behind."""

import json
import re
from pathlib import Path

import pytest

from tests.slurm.cluster import SlurmCluster, last_step, processes_of
from training.checkpoint import complete_steps

STEPS = 300
CONFIG = "configs/pipeline_and_data.yaml"
SMALL = ["--config", CONFIG, "--num_gpus=2", "--model=tiny", "--layers=2", "--json"]  # 2 stages, ZeRO 1
TWO_MACHINES = ("--nodes=2", "1")  # each with so many ranks
ONE_MACHINE = ("--nodes=1", "2")


class Job:
    """A training of two ranks that sbatch has started."""

    def __init__(
        self, slurm: SlurmCluster, folder: Path, layout: tuple[str, str], *options: str, steps: int = STEPS
    ) -> None:
        self.slurm, self.checkpoint, self.file = slurm, folder / "checkpoint", folder / "output"
        nodes, ranks_per_node = layout
        environment = {
            "MASTER_ADDR": "127.0.0.1",  # n0 and n1 are no names of this machine
            "RANKS_PER_NODE": ranks_per_node,
            "CHECKPOINT": str(self.checkpoint),
        }
        command = ["sbatch", "--parsable", nodes, "--cpus-per-task=1", f"--output={self.file}", *options]
        self.id = slurm.call(*command, "scripts/slurm.sbatch", *SMALL, "--steps", str(steps), **environment)

    @property
    def output(self) -> str:
        return self.file.read_text() if self.file.exists() else ""

    @property
    def state(self) -> str:
        return self.slurm.call("squeue", "-h", "-t", "all", "-j", self.id, "-o", "%T", check=False)

    def wait_for(self, condition, seconds: float = 120) -> None:
        assert self.slurm.wait(lambda: condition(self), seconds), f"{self.state}:\n{self.output}"

    def wait_for_step(self, step: int) -> None:
        self.wait_for(lambda job: last_step(job.output) >= step)

    def start_again(self) -> None:
        """Start the requeued job at once; by itself Slurm waits for two minutes."""
        self.wait_for(lambda job: job.state == "PENDING", 180)
        assert not processes_of(str(self.checkpoint))
        self.slurm.call("scontrol", "update", f"jobid={self.id}", "starttime=now")

    def end(self) -> dict:
        """Return the report of a job that ends well."""
        self.wait_for(lambda job: job.state in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"), 240)
        assert self.state == "COMPLETED", self.output
        assert not processes_of(str(self.checkpoint))
        return json.loads(next(line for line in self.output.splitlines() if line.startswith("{")))

    def saved_step(self) -> int:
        return complete_steps(self.checkpoint)[-1]


@pytest.fixture(scope="session")
def undisturbed(slurm, tmp_path_factory) -> dict:
    return Job(slurm, tmp_path_factory.mktemp("undisturbed"), TWO_MACHINES).end()


def refuse_other_results(report: dict, undisturbed: dict, saved: int) -> None:
    assert 0 < saved < STEPS and report["steps"] == STEPS - saved
    for figure in ("last_loss", "replica_digest"):
        assert report[figure] == undisturbed[figure], figure


def test_a_job_preempted_by_one_of_a_higher_partition_resumes_and_ends_with_the_same_loss(
    slurm, tmp_path, undisturbed
):
    job = Job(slurm, tmp_path, TWO_MACHINES)
    job.wait_for_step(1)
    slurm.call("sbatch", "-p", "high", "--nodes=2", "--output=/dev/null", "--wrap", "true")
    job.start_again()
    saved = job.saved_step()
    refuse_other_results(job.end(), undisturbed, saved)
    assert job.output.count("all 2 ranks have met") == 2


def test_sigusr1_writes_a_checkpoint_and_requeues_the_job(slurm, tmp_path, undisturbed):
    job = Job(slurm, tmp_path, ONE_MACHINE)
    job.wait_for_step(1)
    slurm.call("scancel", "--signal=USR1", "--batch", job.id)
    job.start_again()
    saved = job.saved_step()
    refuse_other_results(job.end(), undisturbed, saved)
    assert f"stopped after step {saved} of {STEPS};" in job.output
    assert f"job {job.id} goes back into the queue" in job.output


def test_slurm_sends_sigusr1_before_the_time_limit_and_the_requeued_job_goes_on(slurm, tmp_path):
    job = Job(slurm, tmp_path, ONE_MACHINE, "--time=1", "--signal=B:USR1@10", steps=1_000_000)
    job.wait_for_step(1)
    job.start_again()
    assert "TIME LIMIT" not in job.output
    saved = job.saved_step()
    job.wait_for(lambda job: last_step(job.output) > saved)
    assert re.findall(r"stopped after step (\d+) of", job.output) == [str(saved)]
    slurm.call("scancel", job.id)


@pytest.mark.parametrize("layout", [ONE_MACHINE, TWO_MACHINES])
def test_scancel_ends_the_job_for_good_and_leaves_no_process(slurm, tmp_path, layout):
    job = Job(slurm, tmp_path, layout, steps=1_000_000)
    job.wait_for_step(1)
    assert processes_of(str(job.checkpoint))
    slurm.call("scancel", job.id)
    job.wait_for(lambda job: job.state == "CANCELLED" and not processes_of(str(job.checkpoint)))
    assert job.output.count("all 2 ranks have met") == 1
    assert job.saved_step() >= 1


def test_a_job_whose_script_refuses_its_arguments_fails_and_is_not_requeued(slurm, tmp_path):
    job = Job(slurm, tmp_path, ONE_MACHINE, steps=0)
    job.wait_for(lambda job: job.state == "FAILED")
    assert "steps" in job.output and "Traceback" not in job.output
