"""A parameter that two stages share has the gradient of one process after any number of exchanges."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

from lab.check import assert_same
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.models.model import loss_of
from lab.ranks import run_ranks
from lab.trace.ledger import LEDGER
from pipeline_parallel.pipeline import Pipeline
from pipeline_parallel.schedules import gpipe, table_of
from tests.gradient_changes import halved, set_to_none, zeroed_in_place
from tests.pipeline_parallel.equivalence import RTOL, gpt, gradients_of, only, own_gradients, text

# `step` and `finish` are the pipeline's; the others change the gradients that there are.
PROGRAMS: list[list[str | Callable[[nn.Module], None]]] = [
    ["step", "finish", "step", "finish"],
    ["step", "finish", "finish"],
    ["step", "step", "finish", "step", "finish", "step", "step", "finish"],
    ["step", "finish", set_to_none, "step", "finish"],
    ["step", "finish", zeroed_in_place, "step", "finish", "step", "finish"],
    ["step", set_to_none, "step", "finish"],
    ["step", zeroed_in_place, "step", "step", "finish"],
    ["step", "finish", halved, "step", "finish"],
    ["step", halved, "finish"],
    ["finish", "step", "finish"],
]


def compare(cluster: Cluster, program: list, name: str = "gpipe") -> None:
    """Compare the gradients after the program with those of one process."""
    make = partial(gpt, num_layers=4)
    plain, pipeline = make(), Pipeline(make(), table_of(name, 2, 2), loss_of, text(2)[0])
    own = pipeline.named_own_parameters()
    for number, what in enumerate(program):
        tokens = (text(4)[0] + number) % 13
        if what == "step":
            loss_of(plain(tokens), tokens).backward()
            pipeline.step(tokens, tokens)
        elif what == "finish":
            pipeline.finish_gradient_sync()
        else:
            what(plain)
            what(pipeline)
    assert_same(
        own_gradients(pipeline), only(gradients_of(plain), own), RTOL, f"gradient, {name}, {program},"
    )


def test_a_tied_gradient_counts_once_however_steps_zeroing_and_synchronisation_alternate():
    def work(cluster: Cluster) -> None:
        for program in PROGRAMS:
            compare(cluster, program)
        for name in ("1f1b", "zb_h1", "interleaved", "zb_v"):
            compare(cluster, PROGRAMS[2], name)

    run_ranks(work, 2)


def test_a_tied_gradient_counts_once_after_two_accumulated_steps():
    run_ranks(lambda cluster: compare(cluster, PROGRAMS[0]), 2, timeout=20)


def test_a_second_call_sends_nothing_and_a_step_between_two_zeroings_keeps_nothing():
    def work(cluster: Cluster) -> None:
        x, y = text(4)
        pipeline = Pipeline(gpt(num_layers=2), gpipe(2, 2), loss_of, x[:2])
        pipeline.step(x, y)
        [(tied, _)] = pipeline._shared()
        assert pipeline._new.take(tied) is tied.grad
        pipeline.finish_gradient_sync()
        before = LEDGER.total()
        pipeline.finish_gradient_sync()
        assert LEDGER.total() == before

    run_ranks(work, 2)


def test_copies_that_were_trained_apart_are_noticed_by_all_ranks():
    def work(cluster: Cluster) -> list[str]:
        x, y = text(6)
        pipeline = Pipeline(gpt(num_layers=3), gpipe(3, 3), loss_of, x[:2])
        whole = pipeline.full_state_dict()
        optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
        pipeline.step(x, y)
        optimizer.step()
        optimizer.zero_grad()
        sentences = []
        for _ in range(2):
            with pytest.raises(WorkbookError) as error:
                pipeline.step(x, y)
            sentences.append(str(error.value))
        pipeline.load_full_state_dict(whole)
        for _ in range(2):
            pipeline.step(x, y)
            pipeline.finish_gradient_sync()
            optimizer.step()
            optimizer.zero_grad()
        return sentences

    told = {sentence for sentences in run_ranks(work, 3, group_timeout=20) for sentence in sentences}
    assert told == {
        "A parameter that two stages share was changed before finish_gradient_sync() gave both copies the "
        "same gradient, so the copies now differ: begin again, and call finish_gradient_sync() after each "
        "step()."
    }
