import platform
from unittest import mock

import torch

from comm.same_start import check_same_start
from lab.cluster import Cluster
from lab.ranks import run_ranks

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
