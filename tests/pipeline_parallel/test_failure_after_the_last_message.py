"""All ranks learn of a failure after the last message of the rank that failed."""

import re
import time

import torch

from comm.script import joined
from lab.cluster import Cluster
from lab.models.model import loss_of
from lab.ranks import run_ranks
from pipeline_parallel.pipeline import Pipeline
from pipeline_parallel.schedules import one_f_one_b
from tests.comm.places import places, set_variables
from tests.pipeline_parallel.equivalence import vectors
from tests.pipeline_parallel.test_failure import failing


def test_an_error_after_a_ranks_last_message_is_named_by_all_others_when_that_rank_leaves(capfd):
    """It fails in the optimizer of one stage or another, or in the first stage's last backward."""
    x, y = vectors(8)

    def script(cluster: Cluster, environments: list[dict[str, object]], where: str) -> None:
        set_variables(environments[cluster.rank])
        with joined():
            model, fails = failing(4, 0, 3, in_backward=True)
            pipeline = Pipeline(model, one_f_one_b(4, 4), loss_of, x[:2])
            optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
            for step in range(3):
                fails.is_armed, fails.seen = where == "backward" and step == 1, 0
                pipeline.step(x, y)
                if where == f"optimizer of rank {cluster.rank}" and step == 1:
                    raise ValueError("the optimizer broke")
                optimizer.step()
                optimizer.zero_grad()

    for where, rank in (("backward", 0), *((f"optimizer of rank {rank}", rank) for rank in (0, 1, 3))):
        start = time.monotonic()
        environments = places([0, 1, 2, 3], 4, OP_TIMEOUT=50)
        run_ranks(script, 4, environments, where, backend=None, collect_failures=True, timeout=60)
        assert time.monotonic() - start < 20
        lines = capfd.readouterr().err.splitlines()
        what = where.partition(" ")[0]
        said = [line for line in lines if f"rank {rank} has failed: ValueError: the {what} broke" in line]
        tellers = {int(re.search(r"\[rank (\d)\]", line)[1]) for line in said}
        assert tellers == {0, 1, 2, 3} - {rank}, lines
