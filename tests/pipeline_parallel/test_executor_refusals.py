"""Test that the executor refuses models, schedules and batches that do not fit, on all ranks."""

import pytest
from torch import nn

from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.models.model import loss_of
from lab.ranks import run_ranks
from pipeline_parallel.pipeline import Pipeline
from pipeline_parallel.schedules import one_f_one_b
from tests.pipeline_parallel.equivalence import (
    assert_nothing_is_left,
    mlp,
    vectors,
)


def test_what_does_not_fit_is_refused_in_a_sentence_and_no_rank_is_left_waiting():
    def refuse(cluster: Cluster) -> list[str]:
        x, y = vectors(6)
        sentences = []

        def refused(act) -> None:
            with pytest.raises(WorkbookError) as error:
                act()
            sentences.append(str(error.value))

        refused(lambda: Pipeline(mlp(4), one_f_one_b(2, 2), loss_of, x))
        refused(lambda: Pipeline(mlp(2), one_f_one_b(3, 2), loss_of, x))
        refused(lambda: Pipeline(nn.Linear(2, 2), one_f_one_b(3, 2), loss_of, x))
        pipeline = Pipeline(mlp(4), one_f_one_b(3, 3), loss_of, x[:2])
        refused(lambda: pipeline.step(*vectors(7)))
        pipeline.step(x, y)  # as if nothing had been
        assert_nothing_is_left(pipeline, "after a refusal")
        return sentences

    first, *others = run_ranks(refuse, 3, timeout=20)
    assert first == [
        "The schedule is for 2 ranks, and there are 3.",
        "2 parts cannot be cut into 3 stages: take fewer ranks or --chunks, or more --layers.",
        "A Linear cannot be cut into stages: give an nn.Sequential, or a list of modules of which each takes "
        "what the one before returns.",
        "A batch of 7 cannot be divided into 3 equal microbatches "
        "(a DataLoader's last batch is smaller without drop_last=True).",
    ]
    assert all(other == first for other in others)


def test_microbatches_of_another_size_or_dtype_than_the_example_are_refused():
    def refuse(cluster: Cluster) -> list[str]:
        x, _ = vectors(6)
        pipeline = Pipeline(mlp(3), one_f_one_b(1, 3), loss_of, x[:2])
        sentences = []
        for batch, y in (vectors(9), (x.float(), vectors(6)[1]), vectors(6, width=4)):
            with pytest.raises(WorkbookError) as error:
                pipeline.step(batch, y)
            sentences.append(str(error.value).partition(", but")[0])
        return sentences

    assert run_ranks(refuse, 1) == [
        [
            "A microbatch is [3, 5] of torch.float64",
            "A microbatch is [2, 5] of torch.float32",
            "A microbatch is [2, 4] of torch.float64",
        ]
    ]
