"""Run every RUN_MODE of entrypoint.sh on two fake GPUs, and some with BACKEND=gloo, through host memory."""

import math
import os
from pathlib import Path

import pytest

from lab.ranks import RankError
from tests.fake_gpu.conftest import REAL
from tests.fake_gpu.ranks import SHORT, backend_for, run_script
from tests.run_modes import MODES, SCRIPTS

SECONDS = 0.0 if REAL in os.environ else 0.002  # that each operation of the fake takes longer
UNMEASURED = ("comm", "point_to_point", "train", "diloco_elastic", "hybrid_elastic")
SENDS_ITSELF = ("fsdp", "tensor_parallel_native", "pipeline_native")  # on GPUs, with nccl only
ARGUMENTS = {"comm": ("--mb", "0.25"), "point_to_point": (), "train": ("--steps", "3")}
ARGUMENTS["diloco_plain"] = (*SHORT, "--sync-every", "3")
ARGUMENTS["context_ring"] = ARGUMENTS["context_all_to_all"] = (*SHORT, "--length", "128")


@pytest.mark.parametrize(("mode", "script"), [(mode, script) for mode, script, _ in MODES])
def test_a_run_mode_trains_on_two_gpus(mode: str, script: str):
    if mode in SENDS_ITSELF and backend_for(2) != "nccl":
        pytest.skip("two ranks share a GPU here, and PyTorch's own technique takes nccl only")
    figures = run_script(script, *ARGUMENTS.get(mode, SHORT), FAKE_SLOW=str(SECONDS))
    if "last_loss" in figures:
        assert math.isfinite(figures["last_loss"])
        assert figures["replicas_equal"] is (mode != "train")
    if (seconds := figures.get("communication_seconds")) is not None:
        operations = figures["messages_sent"] / figures["steps"] / 2  # of two ranks: one or two messages each
        assert seconds >= operations * SECONDS
    else:
        assert figures.get("not_measured") or mode in UNMEASURED


@pytest.mark.parametrize(
    "script",
    [
        "data_parallel/train_bucket_overlap.py",
        "zero/train_zero3.py",
        "pipeline_parallel/train_1f1b.py",
    ],
)
def test_a_run_resumes_from_its_checkpoint(script: str, tmp_path: Path):
    options = ("--size", "tiny", "--batch-size", "8", "--checkpoint", str(tmp_path / "checkpoint"))
    run_script(script, "--steps", "2", *options)
    resumed = run_script(script, "--steps", "4", "--resume", *options)
    straight = run_script(script, "--steps", "4", "--size", "tiny", "--batch-size", "8")
    assert resumed["steps"] == 2
    assert resumed["last_loss"] == pytest.approx(straight["last_loss"], rel=1e-6)


def test_an_elastic_script_says_that_it_trains_on_the_cpu(capfd: pytest.CaptureFixture[str]):
    run_script(SCRIPTS["hybrid_elastic"], *SHORT)
    assert "This script trains on the CPU" in capfd.readouterr().err


@pytest.mark.skipif(backend_for(2) != "nccl", reason="there are fewer GPUs than ranks")
def test_with_nccl_a_transport_of_ours_is_refused(capfd: pytest.CaptureFixture[str]):
    with pytest.raises(RankError):
        run_script("data_parallel/train_naive.py", *SHORT, "--transport", "sockets")
    assert "--transport sockets: nccl has its own; leave it out" in capfd.readouterr().err


def test_with_gloo_a_pipelines_messages_go_through_host_memory():
    figures = run_script("pipeline_parallel/train_1f1b.py", *SHORT, BACKEND="gloo")
    assert figures["replicas_equal"] is True and figures["makespan_seconds"] <= figures["step_seconds"]


@pytest.mark.parametrize("mode", SENDS_ITSELF)
def test_with_gloo_a_technique_of_pytorchs_own_is_refused_on_gpus(
    mode: str, capfd: pytest.CaptureFixture[str]
):
    with pytest.raises(RankError):
        run_script(SCRIPTS[mode], *SHORT, BACKEND="gloo")
    assert "sends tensors of GPUs by itself, which only nccl can" in capfd.readouterr().err
