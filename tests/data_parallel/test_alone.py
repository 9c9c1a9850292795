import json
import re

import pytest

from data_parallel import train_alone
from lab.cluster import Cluster
from lab.ranks import RankError, run_ranks


def test_replicas_that_train_alone_drift_apart(capfd):
    def work(cluster: Cluster) -> None:
        train_alone.main(cluster, train_alone.Args(epochs=1, steps=10, json=True))

    run_ranks(work, 3)
    summary = json.loads(capfd.readouterr().out.strip().splitlines()[-1].removeprefix("[rank 0] "))
    assert summary["replicas_equal"] is False
    assert len(summary["drift"]) == 3
    assert all(drift > 1e-4 for drift in summary["drift"])
    assert summary["steps"] == 10


def test_a_single_rank_does_not_drift_and_no_epoch_comes_after_the_last_step(capfd):
    run_ranks(lambda cluster: train_alone.main(cluster, train_alone.Args(epochs=5, steps=2, json=True)), 1)
    captured = capfd.readouterr()
    assert re.findall(r"│ (\d+) +│ \d\.\d{3} +│", captured.err) == ["1"]
    summary = json.loads(captured.out.strip().splitlines()[-1].removeprefix("[rank 0] "))
    assert summary["drift"] == [0.0]
    assert summary["replicas_equal"] is True


@pytest.mark.parametrize("name", ["steps", "epochs", "batch_size", "lr", "seed"])
def test_numbers_out_of_range_are_refused_in_one_sentence(name):
    option = f"--{name.replace('_', '-')} -1"
    with pytest.raises(RankError, match=rf"WorkbookError: {option}: .*\."):
        run_ranks(lambda cluster: train_alone.main(cluster, train_alone.Args(**{name: -1})), 1)


def test_a_batch_size_that_ranks_do_not_divide_is_refused_and_one_that_fits_is_named():
    with pytest.raises(RankError, match=r"--batch-size 25: 2 ranks .* equally; .* such as --batch-size 26"):
        run_ranks(lambda cluster: train_alone.main(cluster, train_alone.Args(batch_size=25)), 2)
