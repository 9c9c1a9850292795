"""Test that BACKEND=gloo accepts GPU tensors, which go through host memory."""

import pytest
import torch

from comm import collectives
from lab.check import assert_same
from lab.cluster import Cluster
from lab.ranks import RankError, run_ranks
from tests.fake_gpu.ranks import SHORT, backend_for, run_script
from tests.fake_gpu.test_run_modes import SENDS_ITSELF
from tests.run_modes import SCRIPTS


def test_with_gloo_a_pipelines_messages_go_through_host_memory():
    figures = run_script("pipeline_parallel/train_1f1b.py", *SHORT, BACKEND="gloo")
    assert figures["replicas_equal"] is True and figures["makespan_seconds"] <= figures["step_seconds"]


def test_with_gloo_torchs_own_collectives_take_gpu_tensors_of_any_layout():
    def results(device: torch.device, rank: int, pattern: str) -> dict[str, torch.Tensor]:
        def numbers(*shape: int) -> torch.Tensor:
            return (torch.arange(24.0)[: torch.Size(shape).numel()].view(shape) + 100 * rank).to(device)

        def empty(*shape: int) -> torch.Tensor:
            return torch.full(shape, -1.0, device=device)

        made = {name: numbers(4, 3).t() for name in ("broadcast", "reduce", "all_reduce", "in flight")}
        made |= {"scatter": empty(2, 3).t(), "gather": empty(4, 6).t(), "all_gather": empty(4, 6).t()}
        made |= {"reduce_scatter": empty(2, 3).t(), "all_to_all": empty(4, 3).t()}
        full = [numbers(4, 3).t()] if rank == 0 else []
        collectives.broadcast(made["broadcast"], root=1, pattern=pattern)
        collectives.reduce(made["reduce"], root=0, pattern=pattern)
        collectives.all_reduce(made["all_reduce"], op="mean", pattern=pattern)
        collectives.scatter(made["scatter"], *full, root=0, pattern=pattern)
        received = [made["gather"]] if rank == 0 else []
        collectives.gather(numbers(4, 3).t(), *received, root=0, pattern=pattern)
        collectives.all_gather(made["all_gather"], numbers(4, 3).t(), pattern=pattern)
        collectives.reduce_scatter(made["reduce_scatter"], numbers(4, 3).t(), pattern=pattern)
        collectives.all_to_all(made["all_to_all"], numbers(4, 3).t(), pattern=pattern)
        handle = collectives.all_reduce(made["in flight"], op="max", async_op=True, pattern=pattern)
        handle.wait()
        return {name: tensor.cpu() for name, tensor in made.items()}

    def compare(cluster: Cluster) -> None:
        expected = results(torch.device("cpu"), cluster.rank, "torch")
        assert_same(results(cluster.device, cluster.rank, "torch"), expected, 0, "result on a GPU,")

    run_ranks(compare, 2, device="cuda", backend="gloo")


@pytest.mark.parametrize("mode", SENDS_ITSELF)
def test_with_gloo_a_technique_of_pytorchs_own_is_refused_on_gpus(
    mode: str, capfd: pytest.CaptureFixture[str]
):
    with pytest.raises(RankError):
        run_script(SCRIPTS[mode], *SHORT, BACKEND="gloo")
    assert "sends tensors of GPUs by itself, which only nccl can" in capfd.readouterr().err


@pytest.mark.skipif(backend_for(2) != "nccl", reason="there are fewer GPUs than ranks")
def test_with_gloo_ddp_trains_as_with_nccl():
    with_gloo = run_script("data_parallel/train_ddp.py", *SHORT, BACKEND="gloo")
    with_nccl = run_script("data_parallel/train_ddp.py", *SHORT)
    assert with_gloo["replicas_equal"] is True
    assert abs(with_gloo["last_loss"] - with_nccl["last_loss"]) < 1e-5
