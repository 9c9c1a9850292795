"""Small tests of what goes wrong in pipelines, short enough to run against a wrong implementation."""

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from lab.check import assert_same
from lab.cluster import Cluster
from lab.models.model import MLP, loss_of
from lab.ranks import run_ranks
from lab.trace.memory import saved_activations
from pipeline_parallel.pipeline import Pipeline
from pipeline_parallel.schedules import table_of
from tests.pipeline_parallel.equivalence import (
    RTOL,
    Batch,
    cnn,
    compare_schedule,
    compare_with_one_process,
    gpt,
    gradients_of,
    images,
    mlp,
    own_gradients,
    text,
    vectors,
)
from tests.pipeline_parallel.rows import parse_row
from training.evaluation import evaluating


def compare(
    *names: str,
    make: Callable[[], nn.Module] = lambda: mlp(4),
    batch_of: Callable[[int], Batch] = vectors,
    microbatches: int = 3,
    n: int = 2,
    group_timeout: float | None = None,
    **options: Any,
) -> None:
    """Compare loss, gradients and parameters of each schedule with those of one process."""

    def work(cluster: Cluster) -> None:
        for name in names:
            compare_schedule(cluster, name, microbatches, make, batch_of, **options)

    run_ranks(work, n, timeout=20, group_timeout=group_timeout)


def test_the_loss_is_the_mean_over_all_microbatches():
    compare("gpipe", "1f1b")


def test_gradients_of_the_microbatches_add_up():
    compare("gpipe", "1f1b", steps=1)


def test_a_backward_uses_the_activations_of_its_own_microbatch():
    compare("gpipe", "1f1b", n=3, make=partial(mlp, 3), steps=1)


def test_messages_meet_the_receives_that_are_meant_for_them():
    """All boundaries have one size, so a message would also fit where another one is expected."""
    compare("interleaved", "zb_v", make=lambda: MLP([6] * 5).double(), batch_of=partial(vectors, width=6))


def test_a_split_backward_computes_every_weights_gradient_once():
    compare("zb_h1", "zb_v")
    compare("zb_h1", make=cnn, batch_of=images, steps=1)


def test_both_copies_of_a_tied_embedding_get_both_gradients():
    compare("1f1b", make=partial(gpt, num_layers=2), batch_of=text)


def test_a_frozen_embedding_gets_no_gradient():
    """Nor do frozen stages and layers, and the others have theirs."""

    def frozen(*names: str) -> nn.Module:
        model = gpt(num_layers=2)
        for name in names:
            model.get_submodule(name).requires_grad_(False)
        return model

    for names in (("head",), ("blocks.1.mlp",), ("token_embedding", "position_embedding", "blocks.0")):
        compare("1f1b", "zb_v", make=partial(frozen, *names), batch_of=text, steps=1)


def test_full_backwards_may_stand_beside_split_ones():
    """So trains any valid table: microbatches in another order on each rank, and stages placed at will."""

    def work(cluster: Cluster) -> None:
        for table in (
            [parse_row("F0 F1 B1 B0", 0), parse_row("F0 F1 I1 W1 I0 W0", 1)],
            [parse_row("F0 F1 B1 B0", 0), parse_row("F1 F0 B0 B1", 1)],
            [parse_row("0F0 1F0 0F1 1F1 1I0 0B0 1I1 1W0 0B1 1W1"), parse_row("2F0 2B0 2F1 2B1")],
        ):
            compare_with_one_process(cluster, lambda: mlp(4), table, vectors(4))

    run_ranks(work, 2, timeout=20)


def test_tied_copies_are_equal_before_the_first_step():
    def work(cluster: Cluster) -> None:
        model, (x, _) = gpt(num_layers=2), text(2)
        if cluster.rank == 1:
            model.head.weight.data.normal_()
        pipeline = Pipeline(model, table_of("1f1b", 2, 2), loss_of, x[:1])
        initial = {name: each.detach() for name, each in pipeline.named_own_parameters().items()}
        expected = {name: each for name, each in gpt(num_layers=2).state_dict().items() if name in initial}
        assert_same(initial, expected, 0, "initial parameter,")

    run_ranks(work, 2, timeout=20)


def test_tied_gradients_are_exchanged_whether_the_number_of_ranks_is_odd_or_even():
    options = {"make": partial(gpt, num_layers=2), "batch_of": text, "microbatches": 1, "steps": 1}
    for n in (3, 2):
        compare("1f1b", n=n, group_timeout=2, **options)


def test_recomputation_drops_out_the_same():
    def work(cluster: Cluster) -> None:
        x, y = text(2)
        gradients = []
        for recompute in (False, True):
            model = gpt(num_layers=2, dropout=0.5)
            pipeline = Pipeline(model, table_of("gpipe", 2, 2), loss_of, x[:1], recompute=recompute)
            torch.manual_seed(cluster.rank)
            pipeline.step(x, y)
            gradients.append(own_gradients(pipeline))
        assert_same(gradients[1], gradients[0], RTOL)

    run_ranks(work, 2, timeout=20)


def test_1f1b_holds_no_more_microbatches_than_ranks_come_after():
    def work(cluster: Cluster) -> None:
        x, y = vectors(6)
        peaks = []
        for m in (1, 6):  # one microbatch alone, and six of the same size
            pipeline = Pipeline(mlp(2), table_of("1f1b", 2, m), loss_of, x[:1])
            with saved_activations(lambda: [x, y, *pipeline.parameters()]) as watch:
                pipeline.step(x[:m], y[:m])
            peaks.append(watch.peak_bytes)
        held, most = peaks[1] / peaks[0], 2 - cluster.rank
        assert held == most, f"rank {cluster.rank} held {held:.2f} microbatches, and not {most}"

    run_ranks(work, 2, timeout=20)


def test_when_weight_gradients_are_computed_nothing_they_needed_is_left():
    """Not even with the garbage collector off: a cycle would keep memory until it runs."""

    def work(cluster: Cluster) -> None:
        x, y = vectors(6)
        for name in ("zb_h1", "1f1b", "interleaved"):
            for recompute in (False, True):
                pipeline = Pipeline(mlp(4), table_of(name, 2, 3), loss_of, x[:2], recompute=recompute)
                saved: list[StorageWeakRef] = []
                own = {StorageWeakRef(t.untyped_storage()) for t in [x, y, *pipeline.parameters()]}

                def note(tensor: Tensor, saved: list[StorageWeakRef] = saved) -> Tensor:
                    saved.append(StorageWeakRef(tensor.untyped_storage()))
                    return tensor.detach()

                gc.disable()
                try:
                    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
                        pipeline.step(x, y)
                    held = [one for one in saved if one not in own and not one.expired()]
                    assert saved and not held, f"{name}: {len(held)} tensors are still held"
                finally:
                    gc.enable()

    run_ranks(work, 2, timeout=20)


def test_the_norm_is_that_of_all_stages():
    def work(cluster: Cluster) -> None:
        x, y = text(4)
        model = gpt(num_layers=2)
        loss_of(model(x), y).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        pipeline = Pipeline(gpt(num_layers=2), table_of("1f1b", 2, 2), loss_of, x[:2])
        pipeline.step(x, y)
        pipeline.finish_gradient_sync()
        torch.testing.assert_close(pipeline.clip_grad_norm_(0.1), norm.double(), rtol=RTOL, atol=0)
        expected, found = gradients_of(model), own_gradients(pipeline)
        assert_same(found, {name: expected[name] for name in found}, RTOL, "clipped gradient,")

    run_ranks(work, 2, timeout=20)


def test_training_goes_on_with_dropout_after_an_evaluation():
    def work(cluster: Cluster) -> None:
        x, _ = text(4)
        pipeline = Pipeline(gpt(num_layers=2, dropout=0.5), table_of("1f1b", 2, 2), loss_of, x[:2])
        with evaluating(pipeline):
            pipeline.forward_only(x)
        assert all(module.training for module in pipeline.modules()), "not in training mode again"

    run_ranks(work, 2, timeout=20)
