"""A step that fails on one rank fails on all of them, in one sentence, and the next step works again."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lab.check import assert_same
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.models.model import loss_of
from lab.ranks import run_ranks
from pipeline_parallel.failure import failure_mark, is_failure_mark
from pipeline_parallel.pipeline import Pipeline
from pipeline_parallel.schedules import gpipe, one_f_one_b, table_of, zb_h1
from tests.pipeline_parallel.equivalence import (
    ALL_SCHEDULES,
    RTOL,
    assert_nothing_is_left,
    gpt,
    gradients_of,
    mlp,
    only,
    own_gradients,
    text,
    vectors,
)


def sentence_of(act: Callable[[], Any]) -> str:
    """Return the sentence that `act` raises, with its type if it is not a WorkbookError."""
    with pytest.raises(Exception) as error:
        act()
    own = isinstance(error.value, WorkbookError)
    return str(error.value) if own else f"{error.typename}: {error.value}"


def assert_trains(pipeline: Pipeline, make: Callable[[], nn.Module], x: Tensor, y: Tensor) -> None:
    """Assert that one step's gradients are those of one process."""
    pipeline.zero_grad()
    plain = make()
    loss_of(plain(x), y).backward()
    pipeline.step(x, y)
    pipeline.finish_gradient_sync()
    own = own_gradients(pipeline)
    assert_same(own, only(gradients_of(plain), own), RTOL, "gradient after a failure,")
    assert_nothing_is_left(pipeline, "after a failure")


def test_a_batch_that_one_rank_refuses_is_refused_by_all_in_one_sentence_and_no_gradient_is_touched():
    x, y = vectors(6)
    cases: list[tuple[Any, Any, str]] = [
        (
            x[:3],
            y,
            r"A microbatch is \[1, 5\] of torch.float64, but the pipeline was made for \[2, 5\] of .*",
        ),
        (x.float(), y, r"A microbatch is \[2, 5\] of torch.float32, but"),
        (x[:5], y, "A batch of 5 cannot be divided into 3 equal microbatches"),
        (x[:0], y, "A batch of 0 cannot be divided"),
        (x, y[:5], "A batch of 5 cannot be divided into 3 equal microbatches"),
        (x, y[:3], "y has 3 rows, but the pipeline was made for x and y of 6, in 3 microbatches"),
        (x[:3], y[:3], "A microbatch is|y has 3 rows"),  # both ranks refuse it, and one of them is heard
        (x, None, "The rank of the last stage needs y, and got None."),
        (None, y, "The rank of the first stage needs x, and got None."),
        ({"x": x}, y, "A pipeline takes x as one tensor with a row for each example, not a dict."),
        (x, (y, y), "A pipeline takes y as one tensor with a row for each example, not a tuple."),
        (x, y[0], "A pipeline takes y as one tensor with a row for each example, not one without rows."),
    ]

    def refuse(cluster: Cluster) -> list[list[str]]:
        found = []
        for table in (one_f_one_b(3, 3), gpipe(3, 3), zb_h1(3, 3)):
            make = partial(mlp, 3)
            pipeline = Pipeline(make(), table, loss_of, x[:2])
            pipeline.step(x, y)
            before = own_gradients(pipeline)
            sentences = []
            for given, targets, _ in cases:  # the first rank alone has x, and the last one y
                mine = given if cluster.rank == 0 else None, targets if cluster.rank == 2 else None
                sentences.append(sentence_of(lambda: pipeline.step(*mine)))
            found.append(sentences)
            assert_same(own_gradients(pipeline), before, 0, "gradient after a refusal,")
            assert_trains(pipeline, make, x, y)
        return found

    for of_table in zip(*run_ranks(refuse, 3, group_timeout=20), strict=True):
        for (*_, expected), *sentences in zip(cases, *of_table, strict=True):
            assert len(set(sentences)) == 1 and re.match(expected, sentences[0]), sentences


def test_a_smaller_last_batch_is_refused_by_all_ranks():
    def refuse(cluster: Cluster) -> str:
        x, y = vectors(4)
        pipeline = Pipeline(mlp(2), gpipe(2, 2), loss_of, x[:2])
        return sentence_of(lambda: pipeline.step(x[:2], y[:2]))

    first, second = run_ranks(refuse, 2, timeout=20, group_timeout=2)
    assert first == second and "without drop_last=True" in first


class Fails(nn.Module):
    """Fails in the forward or in the backward of one microbatch of each step."""

    def __init__(self, at: int, in_backward: bool) -> None:
        super().__init__()
        self.at, self.in_backward, self.is_armed, self.seen = at, in_backward, False, 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        if not self.is_armed or self.seen - 1 != self.at:
            return x
        if not self.in_backward:
            raise ValueError("the forward broke")
        y = x.clone()
        y.register_hook(self.fail)
        return y

    def fail(self, gradient: Tensor) -> None:
        raise ValueError("the backward broke")


def failing(layers: int, rank: int, at: int, in_backward: bool = False) -> tuple[nn.Module, Fails]:
    """Return an MLP with a `Fails` behind one of its layers, in every rank's copy of the model."""
    model, fails = mlp(layers), Fails(at, in_backward)
    model.layers[rank] = nn.Sequential(model.layers[rank], fails)
    return model, fails


def test_an_error_in_a_stage_is_raised_there_and_in_a_sentence_on_all_other_ranks():
    """Test every schedule, three stages, and the first and later microbatches."""
    x, y = vectors(8)

    def fail(cluster: Cluster, stage: int, at: int) -> list[str]:
        found = []
        for name, chunks in ALL_SCHEDULES:
            table = table_of(name, 3, 4, chunks)
            stages = 1 + max(action.stage for row in table for action in row)
            model, fails = failing(stages, stage, at)
            pipeline = Pipeline(model, table, loss_of, x[:2], recompute=name == "gpipe")
            fails.is_armed, fails.seen = True, 0
            found.append(sentence_of(lambda: pipeline.step(x, y)))
            fails.is_armed = False
            assert_nothing_is_left(pipeline, name)
            assert_trains(pipeline, lambda: failing(stages, stage, at)[0], x, y)
        return found

    for stage, at in ((1, 0), (0, 3), (2, 2)):
        for (name, chunks), *raised in zip(
            ALL_SCHEDULES, *run_ranks(fail, 3, stage, at, group_timeout=20), strict=True
        ):
            own = [one for one in raised if one == "ValueError: the forward broke"]
            told = {one for one in raised if one not in own}
            what = (
                f"failed in the forward of microbatch {at} in stage {stage}: ValueError: the forward broke."
            )
            assert len(own) == 1 and len(told) == 1, f"{name}: {raised}"
            assert told.pop() == f"Rank {raised.index(own[0])} {what}", f"{name}, {chunks} chunks: {raised}"


def test_an_error_in_a_backward_reaches_all_that_still_wait_for_a_message_of_that_rank():
    x, y = vectors(8)

    def fail(cluster: Cluster) -> list[str]:
        found = []
        for table in (one_f_one_b(3, 4), zb_h1(3, 4)):
            model, fails = failing(3, 1, 0, in_backward=True)
            pipeline = Pipeline(model, table, loss_of, x[:2])
            fails.is_armed, fails.seen = True, 0
            found.append(sentence_of(lambda: pipeline.step(x, y)))
            fails.is_armed = False
            assert_trains(pipeline, lambda: failing(3, 1, 0)[0], x, y)
        return found

    whole, own, other = run_ranks(fail, 3, group_timeout=20)
    assert own == ["ValueError: the backward broke"] * 2
    for name, *told in zip(("backward", "input gradient"), whole, other, strict=True):
        what = f"Rank 1 failed in the {name} of microbatch 0 in stage 1: ValueError: the backward broke."
        assert told == [what, what]


def test_gradients_that_are_forbidden_on_one_rank_or_on_all_are_a_sentence_on_all():
    def refuse(cluster: Cluster) -> list[str]:
        x, y = vectors(4)
        pipeline = Pipeline(mlp(2), one_f_one_b(2, 2), loss_of, x[:2])
        sentences = []
        for ranks in ((0,), (1,), (0, 1)):
            with torch.set_grad_enabled(cluster.rank not in ranks):
                sentences.append(sentence_of(lambda: pipeline.step(x, y)))
        with torch.inference_mode():
            sentences.append(sentence_of(lambda: pipeline.step(x, y)))
        assert_trains(pipeline, partial(mlp, 2), x, y)
        return sentences

    for sentences in run_ranks(refuse, 2, group_timeout=20):
        assert len(set(sentences)) == 1 and "which torch.no_grad() forbids" in sentences[0], sentences


def test_a_model_that_was_changed_after_the_pipeline_was_made_is_refused():
    """A stage would send what does not fit into the buffer of the receiver, or nothing."""

    def refuse(cluster: Cluster) -> list[str]:
        x, y = text(4)
        model = gpt(num_layers=2).float()
        pipeline = Pipeline(model, one_f_one_b(2, 2), loss_of, x[:2])
        model.double()
        cast = sentence_of(lambda: pipeline.step(x, y))
        x, y = vectors(4)
        model = mlp(2)
        pipeline = Pipeline(model, one_f_one_b(2, 2), loss_of, x[:2])
        model.layers[1].register_forward_hook(lambda module, args, output: output.detach())
        return [cast, sentence_of(lambda: pipeline.step(x, y))]

    first, second = run_ranks(refuse, 2, group_timeout=20)
    assert first == second
    assert first == [
        "The result of the forward of microbatch 0 in stage 0 is [2, 5, 8] of torch.float64, but the "
        "pipeline was made for [2, 5, 8] of torch.float32: make a new one after a change of the model.",
        "The backward of microbatch 0 in stage 1 has no gradient to send: the output does not depend on the "
        "input.",
    ]


def test_a_pipeline_that_cannot_be_made_on_one_rank_is_made_on_none():
    x, _ = vectors(2)

    def refuse(cluster: Cluster) -> list[str]:
        odd = cluster.rank == 1
        table = one_f_one_b(2, 2)
        makers: list[Callable[[], Pipeline]] = [
            lambda: Pipeline(mlp(1 if odd else 2), table, loss_of, x),
            lambda: Pipeline(mlp(3 if odd else 2), table, loss_of, x),
            lambda: Pipeline(mlp(2), gpipe(2, 2) if odd else table, loss_of, x),
            lambda: Pipeline(mlp(2), one_f_one_b(3, 2) if odd else table, loss_of, x),
            lambda: Pipeline(mlp(2), table, loss_of, None if odd else x),
            lambda: Pipeline(mlp(2), table, loss_of, x[:, :3]),
            lambda: Pipeline(mlp(2), table, loss_of, x[0, 0]),
        ]
        sentences = [sentence_of(make) for make in makers]
        for layer, made, sentence in (
            (1, lambda x: (x, x), "of at most 8 dims, but stage 1 returns a tuple."),
            (0, lambda x: x.argmax(-1), "Stage 0 returns a tensor of torch.int64, which has no gradient"),
        ):
            model = mlp(2)
            model.layers[layer].register_forward_hook(lambda module, args, output: made(output))
            found = sentence_of(lambda: Pipeline(model, table, loss_of, x))
            assert sentence in found, found
            sentences.append(found)
        return sentences

    first, second = run_ranks(refuse, 2, timeout=20, group_timeout=5)
    assert first == second
    different = (
        "The ranks make different pipelines: give the same model, schedule, costs and split on all ranks."
    )
    assert first[:5] == [
        "1 parts cannot be cut into 2 stages: take fewer ranks or --chunks, or more --layers.",
        different,
        different,
        "The schedule is for 3 ranks, and there are 2.",
        "`example` must be a microbatch of the input: one tensor of 1 to 8 dims, not NoneType.",
    ]
    assert first[5].startswith("Stage 0 cannot take its input, [2, 3] of torch.float64: ")
    assert first[6] == "`example` must be a microbatch of the input: one tensor of 1 to 8 dims, not 0 dims."


def test_a_mark_is_no_number_that_arithmetic_makes():
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64):
        for shape in ((1,), (3,), (2, 5)):
            made = failure_mark(torch.empty(shape, dtype=dtype, device="meta"), "cpu")
            assert (made.shape, made.dtype) == (torch.Size(shape), dtype)
            assert is_failure_mark(made) and made.isnan().all()
            not_a_number = torch.full(shape, torch.nan, dtype=dtype)
            for other in (
                not_a_number,
                -not_a_number,
                torch.zeros(shape, dtype=dtype).log() * 0,
                made.new_ones(shape),
            ):
                assert not is_failure_mark(other), (dtype, other)
    assert not is_failure_mark(torch.empty(0))
