"""The steps that lessons write by hand do what the executor does on the same schedule."""

import gc
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from comm.cost import Link
from comm.wire import slow_link
from lab.check import assert_same
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.models.model import loss_of
from lab.ranks import run_ranks
from lab.trace.ledger import LEDGER
from lab.trace.timeline import recorded, start_recording, stop_recording
from pipeline_parallel.activations import ActivationWatch
from pipeline_parallel.by_hand import HandWritten
from pipeline_parallel.pipeline import Pipeline
from pipeline_parallel.schedules import table_of
from pipeline_parallel.train_afab import AllForwardAllBackward
from pipeline_parallel.train_model_parallel import ModelParallel
from tests.pipeline_parallel.equivalence import (
    RTOL,
    Batch,
    assert_nothing_is_left,
    cnn,
    compare_schedule,
    gpt,
    gradients_of,
    images,
    mlp,
    only,
    own_gradients,
    text,
    vectors,
)

Lesson = Callable[..., HandWritten]
LESSONS: list[tuple[str, Lesson]] = [("naive", ModelParallel), ("gpipe", AllForwardAllBackward)]


def one_step(
    schedule: str,
    lesson: Lesson | None,
    make: Callable[[], nn.Module],
    batch: Batch,
    ranks: int,
    **options: Any,
) -> dict[str, Any]:
    """Return what a step leaves and does on this rank: by hand, or by the executor if `lesson` is None."""
    microbatches, (x, y) = options.pop("microbatches", 3), batch
    table = table_of(schedule, ranks, microbatches)
    example = x[: len(x) // microbatches]
    pipeline = Pipeline(make(), table, loss_of, example, by_hand=lesson, **options)
    pipeline.executor.watch = watch = ActivationWatch()
    watch.ignore(pipeline.parameters())
    LEDGER.clear()
    start_recording()
    torch.manual_seed(pipeline.rank)
    outcome = pipeline.step(x.clone().requires_grad_(x.is_floating_point()), y)
    pipeline.finish_gradient_sync()
    stop_recording()
    actions = [(e.name, e.kind, e.args) for e in recorded() if "action" in e.args]
    return {
        "gradients": own_gradients(pipeline),
        "results": {"loss": outcome.loss, "input": outcome.input_gradient},
        "actions": actions,
        "held": watch.peak_held,
        "bytes": watch.peak_bytes,
        "sent": LEDGER.rows(),
    }


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_by_hand_and_by_table_agree_gradient_by_gradient_and_message_by_message(n: int):
    cases: list[tuple[Callable[[], nn.Module], Batch]] = [
        (partial(gpt, num_layers=n + 1), text(6)),
        (partial(gpt, num_layers=n + 1, tied=False), text(6)),
        (partial(mlp, n + 1), vectors(6)),
        (cnn, images(6)),
    ]

    def compare(cluster: Cluster) -> None:
        for (schedule, lesson), (make, batch), m in product(LESSONS, cases, (1, 3)):
            by_table = one_step(schedule, None, make, batch, n, microbatches=m)
            by_hand = one_step(schedule, lesson, make, batch, n, microbatches=m)
            for what in ("gradients", "results"):
                assert_same(by_hand[what], by_table[what], 0, f"{what} of {schedule}, m={m},")
            for what in ("actions", "held", "bytes", "sent"):
                assert by_hand[what] == by_table[what], (schedule, m, what)

    run_ranks(compare, n)


@pytest.mark.parametrize("n", [1, 3])
def test_both_lessons_have_the_gradients_of_one_process_frozen_recomputed_and_cut_unevenly(n: int):
    def frozen() -> nn.Module:
        model = gpt(num_layers=4, tied=False)
        for name, parameter in model.named_parameters():
            is_first = name.startswith(("token_embedding", "position_embedding", "blocks.0", "blocks.1"))
            parameter.requires_grad_(not is_first)
        return model

    def compare(cluster: Cluster) -> None:
        for name, lesson in LESSONS:
            of = partial(compare_schedule, cluster, name, 3, by_hand=lesson)
            of(frozen, text)
            of(partial(gpt, num_layers=4), text, recompute=True)
            of(partial(mlp, 5), vectors, recompute=[n - 1])
            of(partial(gpt, num_layers=4), text, costs=[9.0, 1, 1, 1, 1, 1])

    run_ranks(compare, n)


def test_recomputation_keeps_what_the_executors_does_and_drops_out_the_same():
    def compare(cluster: Cluster) -> None:
        make = partial(gpt, num_layers=3, dropout=0.4)
        for schedule, lesson in LESSONS:
            kept = one_step(schedule, lesson, make, text(6), 2)
            again = one_step(schedule, lesson, make, text(6), 2, recompute=True)
            by_table = one_step(schedule, None, make, text(6), 2, recompute=True)
            assert_same(again["gradients"], kept["gradients"], RTOL)
            assert again["bytes"] == by_table["bytes"] < kept["bytes"]

    run_ranks(compare, 2)


def test_a_step_under_autocast_is_the_executors():
    def compare(cluster: Cluster) -> None:
        for schedule, lesson in LESSONS:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                x, y = images(6)
                by_hand, by_table = (
                    one_step(schedule, each, lambda: cnn().float(), (x.float(), y), 2)["gradients"]
                    for each in (lesson, None)
                )
            assert_same(by_hand, by_table, 0)

    run_ranks(compare, 2)


class Failing(nn.Module):
    """Fails in the forward or the backward of one microbatch, as long as it is switched on."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.fails_in, self.count = inner, "", 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        if self.fails_in == "forward" and self.count == 2:
            raise RuntimeError("out of luck")
        y = self.inner(x)
        if self.fails_in == "backward" and self.count == 2:
            y.register_hook(self.fail)
        return y

    def fail(self, gradient: Tensor) -> Tensor:
        raise RuntimeError("out of luck")


@pytest.mark.parametrize("where", [0, 1, 2])
def test_a_step_that_fails_on_one_rank_fails_as_the_executors_does_and_the_next_one_works(where: int):
    """All ranks raise one sentence, but for those that had all their messages when it happened."""

    def fail(cluster: Cluster, is_by_hand: bool) -> list[str]:
        sentences = []
        x, y = vectors(6)
        for schedule, lesson in LESSONS:
            model = mlp(3)
            layer = Failing(model.layers[where])
            model.layers[where] = layer
            by_hand = lesson if is_by_hand else None
            pipeline = Pipeline(model, table_of(schedule, 3, 3), loss_of, x[:2], by_hand=by_hand)
            for what in ("forward", "backward"):
                layer.fails_in, layer.count = what, 0
                sentences.append(f"{schedule} {what}: nothing")
                try:
                    pipeline.step(x, y)
                except (WorkbookError, RuntimeError) as error:
                    sentences[-1] = f"{schedule} {what}: {error}"
                assert_nothing_is_left(pipeline, schedule)
                layer.fails_in = ""
                pipeline.zero_grad()
                pipeline.step(x, y)
                plain = mlp(3)
                loss_of(plain(x), y).backward()
                own = {name.replace(".inner", ""): own for name, own in own_gradients(pipeline).items()}
                assert_same(own, only(gradients_of(plain), own), RTOL, f"gradient after {what},")
        return sentences

    of_ranks = run_ranks(fail, 3, True, timeout=30)
    assert of_ranks == run_ranks(fail, 3, False, timeout=30)
    told = (
        f"forward: Rank {where} failed in the forward of microbatch 1 in stage {where}: RuntimeError: out of"
    )
    for rank, sentences in enumerate(of_ranks):
        assert f"{'forward: out of' if rank == where else told} luck" in sentences[0]


def test_a_batch_that_does_not_fit_is_refused_by_all_ranks():
    def refuse(cluster: Cluster) -> list[str]:
        sentences = []
        x, y = vectors(6)
        for schedule, lesson in LESSONS:
            pipeline = Pipeline(mlp(3), table_of(schedule, 3, 3), loss_of, x[:2], by_hand=lesson)
            for batch in ((x[:5], y), (x, y[:3]), (None, y), ({0: x}, y)):
                with pytest.raises(WorkbookError) as error:
                    pipeline.step(*batch)
                sentences.append(str(error.value))
            pipeline.step(x, y)
            assert_nothing_is_left(pipeline, schedule)
        return sentences

    first, *others = run_ranks(refuse, 3, timeout=20)
    assert first[0].startswith("A batch of 5 cannot be divided into 3 equal microbatches")
    assert first[1].startswith("y has 3 rows, but")
    assert first[2] == "The rank of the first stage needs x, and got None."
    assert all(other == first for other in others)


def test_under_the_clock_a_step_takes_no_less_than_the_formula_and_sends_real_messages():
    tick, n, m = 0.01, 3, 4

    def measure(cluster: Cluster) -> list[float]:
        found = []
        x, y = text(m)
        for schedule, lesson in LESSONS:
            pipeline = Pipeline(
                gpt(num_layers=2), table_of(schedule, n, m), loss_of, x[:1], tick=tick, by_hand=lesson
            )
            LEDGER.clear()
            with slow_link.slowed(Link(1e-4, 1e-9)):
                start_recording()
                pipeline.step(x, y)
                stop_recording()
            pipeline.finish_gradient_sync()
            assert LEDGER.total() == pipeline.traffic_per_step()
            actions = [event for event in recorded() if "action" in event.args]
            assert len(actions) == 2 * m
            found.append((max(e.end_ns for e in actions) - min(e.start_ns for e in actions)) / 1e9)
        return found

    naive, gpipe = run_ranks(measure, n)[0]  # no upper limit: other processes may have the cores
    assert naive > 0.98 * m * n * 3 * tick, naive
    assert gpipe > 0.98 * (m + n - 1) * 3 * tick, gpipe


def test_after_a_step_only_parameters_and_their_gradients_are_left():
    def measure(cluster: Cluster) -> None:
        x, y = vectors(9)
        x.requires_grad_()
        for schedule, lesson in LESSONS:
            pipeline = Pipeline(mlp(4), table_of(schedule, 2, 3), loss_of, x[:3], by_hand=lesson)
            pipeline.step(x, y)
            alive: list[StorageWeakRef] = []
            own = {StorageWeakRef(t.untyped_storage()) for t in [x, y, *pipeline.parameters()]}

            def note(tensor: Tensor) -> Tensor:
                alive.append(StorageWeakRef(tensor.untyped_storage()))
                return tensor.detach()

            gc.disable()  # a circle would keep memory until the garbage collector happens to run
            try:
                with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
                    pipeline.step(x, y)
                left = [ref for ref in alive if ref not in own and not ref.expired()]
                assert alive and not left, f"{schedule}: {len(left)} of {len(alive)}"
            finally:
                gc.enable()
            assert_nothing_is_left(pipeline, schedule)

    run_ranks(measure, 2)
