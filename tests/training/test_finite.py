"""A training that diverges ends before the optimizer's step, and leaves the last good checkpoint as it is."""

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.ranks import RankError, run_ranks
from tests.training.attempts import STEPS, train
from training.checkpoint import Checkpoints, complete_steps
from training.finite import not_finite
from training.state_shards import StateShard


@pytest.mark.parametrize("mode", ["naive", "zero3"])
def test_the_sentence_names_parameter_step_and_rank(mode: str):
    with pytest.raises(RankError, match=r"The gradient of \S+ is not finite in step 2 on rank \d"):
        run_ranks(lambda cluster: train(cluster, mode, lr=1e30), 2)


def test_allow_nonfinite_goes_on():
    reports = run_ranks(lambda cluster: train(cluster, "naive", lr=1e30, allow_nonfinite=True), 2)
    assert [report["steps"] for report in reports] == [STEPS, STEPS]


@pytest.mark.parametrize("number", [float("inf"), float("-inf"), float("nan")])
def test_one_number_is_enough(number: float):
    whole, odd = torch.ones(5), torch.ones(2, 3, dtype=torch.float64)
    named = [("whole", whole), ("counts", torch.ones(3, dtype=torch.int64)), ("odd", odd)]
    assert not_finite(named) is None
    odd[1, 2] = number
    assert not_finite(named) == "odd"


def test_a_checkpoint_that_is_not_finite_is_not_written_and_the_good_one_stays():
    def work(cluster: Cluster) -> str:
        checkpoints, weight = Checkpoints(folder, cluster, keep=1), torch.ones(4)
        checkpoints.save(1, [StateShard("model/weight", weight)])
        weight[cluster.rank] = torch.inf
        checkpoints.save(2, [StateShard("model/weight", weight)])
        try:
            checkpoints.wait()
        except WorkbookError as refusal:
            return str(refusal)
        return "written"

    with TemporaryDirectory() as name:
        folder = Path(name)
        refusals = run_ranks(work, 2)
        assert any("model/weight has numbers that are not finite" in refusal for refusal in refusals)
        assert complete_steps(folder) == [1]
