"""Test that the executor runs each action of its row once, with the right tensors."""

from itertools import product

import torch
from torch import Tensor

from lab.check import assert_same
from lab.cluster import Cluster
from lab.models.model import loss_of
from lab.ranks import run_ranks
from lab.trace.ledger import LEDGER, Traffic
from pipeline_parallel.executor import Executor
from pipeline_parallel.pipeline import Pipeline
from pipeline_parallel.schedules import gpipe, one_f_one_b, stages_per_rank, table_of, zb_v
from tests.pipeline_parallel.equivalence import (
    ALL_SCHEDULES,
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
