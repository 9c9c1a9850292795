import json
import re

import pytest

from data_parallel import train_alone
from lab.cluster import Cluster
from lab.ranks import RankError, run_ranks


def test_replicas_that_train_alone_drift_apart_and_one_does_not(capfd):
    def work(cluster: Cluster) -> None:
        train_alone.main(cluster, train_alone.Args(epochs=5, steps=2, json=True))

    for world_size in (3, 1):
        run_ranks(work, world_size)
        captured = capfd.readouterr()
        summary = json.loads(captured.out.strip().splitlines()[-1].removeprefix("[rank 0] "))
        assert summary["replicas_equal"] is (world_size == 1)
        assert len(summary["drift"]) == world_size and summary["steps"] == 2
        assert all((drift > 1e-5) == (world_size > 1) for drift in summary["drift"])
    assert re.findall(r"│ (\d+) +│ \d\.\d{3} +│", captured.err) == ["1"]  # no epoch after the last step


def test_numbers_out_of_range_and_a_batch_that_ranks_do_not_divide_are_refused_in_one_sentence():
    for name, value, sentence in (
        ("steps", -1, r"--steps -1: .*\."),
        ("epochs", -1, r"--epochs -1: .*\."),
        ("batch_size", 25, r"2 ranks cannot share a batch of 25 .* equally; .* such as --batch-size 26"),
    ):
        with pytest.raises(RankError, match="WorkbookError: " + sentence):
            run_ranks(lambda cluster: train_alone.main(cluster, train_alone.Args(**{name: value})), 2)
