"""The executor sends, refuses and frees what it should."""

import gc
import time
from itertools import product

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from comm import collectives
from comm.cost import Link
from comm.transport import slow_link
from lab.check import assert_same
from lab.cluster import Cluster
from lab.errors import WorkbookError
from lab.ledger import LEDGER, Traffic
from lab.memory import live_bytes
from lab.model import MLP, loss_of
from lab.ranks import run_ranks
from lab.timeline import recorded, start_recording, stop_recording
from pipeline_parallel import from_events
from pipeline_parallel.executor import Executor
from pipeline_parallel.pipeline import Pipeline
from pipeline_parallel.schedules import gpipe, interleaved_1f1b, one_f_one_b, stages_per_rank, table_of, zb_v
from pipeline_parallel.simulate import Costs, simulate
from pipeline_parallel.stage_runner import AutogradRunner
from tests.lab.simulated_gpu import simulated_gpu
from tests.pipeline_parallel.equivalence import (
    ALL_SCHEDULES,
    assert_nothing_is_left,
    cnn,
    gpt,
    images,
    mlp,
    text,
    vectors,
)


def test_traffic_is_microbatches_times_boundaries_and_once_a_tied_gradient():
    """The numbers are computed by hand. That the ledger agrees for all schedules is tested in
    test_equivalence.
    """

    def count(cluster: Cluster) -> list[Traffic]:
        x, y = text(6)
        found = []
        for table, tied in ((one_f_one_b(3, 3), False), (gpipe(3, 3), True), (zb_v(3, 3), True)):
            pipeline = Pipeline(gpt(num_layers=6, tied=tied), table, loss_of, x[:2])
            before = LEDGER.total()
            pipeline.step(x, y)
            pipeline.finish_gradient_sync()
            found.append(LEDGER.total() - before)
            assert found[-1] == pipeline.traffic_per_step()
        return found

    activation, embedding = 2 * 5 * 8 * 8, 13 * 8 * 8
    plain = [Traffic(3 * k * activation, 3 * k) for k in (1, 2, 1)]
    shared = [Traffic(embedding, 1), Traffic(), Traffic(embedding, 1)]
    in_a_v = [Traffic(3 * k * activation, 3 * k) for k in (2, 4, 2)]
    tied = [a + b for a, b in zip(plain, shared, strict=True)]
    assert run_ranks(count, 3) == [list(of_rank) for of_rank in zip(plain, tied, in_a_v, strict=True)]


def test_stages_know_the_shape_and_dtype_of_what_they_receive():
    def look(cluster: Cluster) -> list[dict[int, tuple[list[int], torch.dtype]]]:
        found = []
        cases = [
            (cnn(), images(3)[0]),
            (cnn().float(), images(3)[0].float()),
            (gpt(num_layers=4), text(3)[0]),
        ]
        for model, example in cases:
            pipeline = Pipeline(model, one_f_one_b(4, 2), loss_of, example)
            assert all(like.device.type == "meta" for like in pipeline.boundaries.values())
            found.append({k: (list(like.shape), like.dtype) for k, like in pipeline.boundaries.items()})
        return found

    def ranks_of(shapes: list[list[int]], dtype: torch.dtype, first: torch.dtype) -> list[dict]:
        known = [(shape, first if k == 0 else dtype) for k, shape in enumerate(shapes)]
        return [{rank: known[rank], rank + 1: known[rank + 1]} for rank in range(4)]

    of_images = [[3, 1, 8, 8], [3, 8, 8, 8], [3, 256], [3, 64], [3, 10]]
    of_text = [[3, 5], [3, 5, 8], [3, 5, 8], [3, 5, 8], [3, 5, 13]]
    double, single = torch.float64, torch.float32
    expected = [
        ranks_of(of_images, double, double),
        ranks_of(of_images, single, single),
        ranks_of(of_text, double, torch.int64),
    ]
    assert run_ranks(look, 4) == [list(of_rank) for of_rank in zip(*expected, strict=True)]


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


def test_ranks_between_the_first_and_the_last_need_no_batch():
    def run(cluster: Cluster) -> None:
        x, y = vectors(6)
        pipeline = Pipeline(mlp(3), one_f_one_b(3, 3), loss_of, x[:2])
        mine = {0: (x, None), 1: (None, None), 2: (None, y)}[cluster.rank]
        outcome = pipeline.step(*mine)
        assert (outcome.loss is not None) == (cluster.rank == 2)
        if outcome.loss is not None:
            expected = {"loss": loss_of(mlp(3)(x), y).detach()}
            assert_same({"loss": outcome.loss}, expected, what="result")

    run_ranks(run, 3)


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


class Counting:
    """Is a runner whose tensors say where they have been: microbatch and stage in every number."""

    def __init__(self, stage: int, last: bool) -> None:
        self.stage, self.last, self.log = stage, last, []

    def begin_step(self) -> None:
        self.log.clear()

    def add_wait(self, seconds: float) -> None:
        assert 0 <= seconds < 60

    def last_span(self) -> None:
        return None

    def forward(self, microbatch: int, x: Tensor, target: Tensor | None = None) -> Tensor:
        self.log.append(f"F{microbatch}")
        history = [microbatch, *range(self.stage)]
        assert x[0].tolist() == history + [-1] * (len(x[0]) - len(history)), (self.stage, microbatch, x)
        y = x.detach().clone()
        y[:, self.stage + 1] = self.stage
        assert (target is not None) == self.last and (target is None or int(target[0]) == microbatch)
        return y if target is None else torch.ones(())

    def backward(self, microbatch: int, dy: Tensor | None) -> Tensor | None:
        self.log.append(f"B{microbatch}")
        return self._gradient(microbatch, dy)

    def backward_input(self, microbatch: int, dy: Tensor | None) -> Tensor | None:
        self.log.append(f"I{microbatch}")
        return self._gradient(microbatch, dy)

    def backward_weight(self, microbatch: int) -> None:
        self.log.append(f"W{microbatch}")

    def deferred_tensors(self, microbatch: int) -> list[Tensor]:
        return []

    def _gradient(self, microbatch: int, dy: Tensor | None) -> Tensor:
        if self.last:
            assert dy is None
            return torch.full((1, 16), 100.0 * microbatch + self.stage)
        assert dy is not None and (dy == 100.0 * microbatch + self.stage + 1).all()
        return dy - 1


def test_it_does_each_row_in_its_order_with_the_tensors_of_the_right_microbatch_and_stage():
    def run(cluster: Cluster) -> None:
        for (name, chunks), apart in product(ALL_SCHEDULES, (False, True)):  # True as on nccl
            table = table_of(name, 3, 5, chunks)
            last = 3 * stages_per_rank(name, chunks) - 1
            own = sorted({action.stage for action in table[cluster.rank]})
            like = torch.empty(1, 16, device="meta")
            runners = {stage: Counting(stage, stage == last) for stage in own}
            boundaries = dict.fromkeys(range(last + 2), like)
            executor = Executor(table, runners, boundaries, cluster.rank, apart=apart)
            x = torch.full((5, 16), -1.0)
            x[:, 0] = torch.arange(5)
            for _ in range(2):
                outcome = executor.step(x, torch.arange(5))
                for stage in own:
                    row = [f"{a.kind}{a.microbatch}" for a in table[cluster.rank] if a.stage == stage]
                    assert runners[stage].log == row, (name, stage)
                    runners[stage].log.clear()
                if 0 in own:
                    assert outcome.input_gradient[:, 0].tolist() == [0.0, 100.0, 200.0, 300.0, 400.0]
                if last in own:
                    assert outcome.loss == 5

    run_ranks(run, 3)


def test_a_message_over_a_slow_link_arrives_no_sooner_than_the_simulator_says():
    """A clock replaces computing; rank 0 begins and ends the step. There is a lower limit only."""
    tick, link = 0.002, Link(0.01, 1e-6)

    def measure(cluster: Cluster) -> list[float]:
        x, y = vectors(3)
        seconds = []
        for table in (one_f_one_b(2, 3), interleaved_1f1b(2, 3), zb_v(2, 3)):
            pipeline = Pipeline(MLP([5] * 5).double(), table, loss_of, x[:1], tick=tick)
            with slow_link.slowed(link):
                collectives.barrier(pattern="torch")
                start = time.perf_counter()
                pipeline.step(x, y)
                seconds.append(time.perf_counter() - start)
        return seconds

    taken, _ = run_ranks(measure, 2)
    for table, seconds in zip((one_f_one_b(2, 3), interleaved_1f1b(2, 3), zb_v(2, 3)), taken, strict=True):
        stages = 1 + max(action.stage for row in table for action in row)
        chunks = stages // 2
        costs = Costs.equal(stages, *[tick / chunks] * 3)
        simulation = simulate(table, costs, link, 5 * 8)
        of_rank_0 = simulation.rows[0][-1].end
        assert seconds >= 0.98 * of_rank_0 > 3 * link.alpha, (seconds, of_rank_0)


def test_on_a_gpu_an_action_takes_what_the_device_computes_and_not_the_launch():
    def measure(cluster: Cluster) -> tuple[float, float, Costs]:
        x, y = torch.zeros(2, 1), torch.zeros(2)
        with simulated_gpu() as gpu:

            class Launching(nn.Module):
                def forward(self, x):
                    gpu.launch(3)
                    x.register_hook(lambda _: gpu.launch(8))
                    return 2 * x

            boundaries = dict.fromkeys((0, 1), torch.empty(1, 1, device="meta"))
            runners = {0: AutogradRunner(Launching(), 2, lambda y, _: y.sum())}
            executor = Executor(gpipe(1, 2), runners, boundaries, rank=0)
            start_recording(gpu.device)
            executor.step(x.requires_grad_(), y)
            stop_recording()
            actions = [event for event in recorded() if "action" in event.args]
            return (
                from_events.makespan(actions),
                from_events.bubble(actions, 1),
                from_events.costs(actions, 1),
            )

    (found,) = run_ranks(measure, 1)
    assert found == (0.022, 0.0, Costs((0.003,), (0.004,), (0.004,)))
