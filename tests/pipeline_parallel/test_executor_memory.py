"""Test that the executor frees activations and messages as soon as they are used."""

import gc

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from lab.cluster import Cluster
from lab.models.model import loss_of
from lab.ranks import run_ranks
from lab.trace.memory import live_bytes
from pipeline_parallel.pipeline import Pipeline
from pipeline_parallel.schedules import one_f_one_b, stages_per_rank, table_of
from tests.pipeline_parallel.equivalence import (
    ALL_SCHEDULES,
    assert_nothing_is_left,
    mlp,
    vectors,
)


def test_after_a_step_only_parameters_and_their_gradients_are_left():
    """The garbage collector is off: a cycle of references would keep memory until it runs."""

    def measure(cluster: Cluster) -> None:
        x, y = vectors(9)
        x.requires_grad_()
        for name, chunks in ALL_SCHEDULES:
            table = table_of(name, 2, 3, chunks)
            for recompute in (False, True):
                pipeline = Pipeline(
                    mlp(2 * stages_per_rank(name, chunks)), table, loss_of, x[:3], recompute=recompute
                )
                pipeline.step(x, y)
                alive: list[StorageWeakRef] = []
                own = {StorageWeakRef(t.untyped_storage()) for t in [x, y, *pipeline.parameters()]}

                def note(tensor: Tensor) -> Tensor:
                    alive.append(StorageWeakRef(tensor.untyped_storage()))
                    return tensor.detach()

                before = live_bytes({"parameters": pipeline.parameters()})["other"]
                gc.disable()
                try:
                    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
                        outcome = pipeline.step(x, y)
                    left = [ref for ref in alive if ref not in own and not ref.expired()]
                    assert alive and not left, f"{name}, recompute={recompute}: {len(left)} of {len(alive)}"
                finally:
                    gc.enable()
                del outcome
                assert live_bytes({"parameters": pipeline.parameters()})["other"] == before, name
                assert_nothing_is_left(pipeline, name)

    run_ranks(measure, 2)


def test_memory_of_a_message_is_free_before_the_step_ends():
    """Of 12 activations, only a few wait to arrive or to be used at the same time."""

    def measure(cluster: Cluster) -> None:
        x, y = vectors(12)
        pipeline = Pipeline(mlp(3), one_f_one_b(3, 12), loss_of, x[:1])
        executor, most = pipeline.executor, [0, 0, 0]
        act = executor._act

        def look(action) -> None:
            act(action)
            for i, waiting in enumerate((executor._ready, executor._arriving, executor._leaving)):
                most[i] = max(most[i], len(waiting))

        executor._act = look
        pipeline.step(x, y)
        assert most[0] <= 1 and most[1] <= 2 and most[2] <= 6, most

    run_ranks(measure, 3)
