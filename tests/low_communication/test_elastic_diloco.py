"""Wherever workers die and come back, all end as workers in one process do: a mean is over those present."""

import functools
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from comm import rendezvous
from comm.membership.survivors import Survivors
from lab.check import assert_same
from lab.cluster import Cluster
from lab.launch.errors import Complete, WorkbookError
from lab.launch.interface import open_sockets, shut_down_connections
from lab.models.model import GPT, GPTConfig, loss_of
from lab.ranks import RankError, run_ranks
from low_communication import train_elastic_diloco
from low_communication.train_elastic_diloco import ElasticDiLoCoArgs, Worker
from tests.comm.places import places, set_variables
from tests.hybrid_parallel.test_elastic import and_then, at_step, die, interrupted
from training.data import TrainingData

# Rounds of 2 steps, and a last one of 1 step.
ARGS = ElasticDiLoCoArgs(steps=9, sync_every=2, batch_size=12, size="tiny", json=True, patience=10.0)
AdamW = functools.partial(torch.optim.AdamW, eps=1e-3)  # a small eps magnifies rounding
State = dict[str, Tensor]
Disturb = Callable[[Cluster], None]


class Dies(Exception):
    """Ends a rank as its death would, but leaves the process, in which it can come back."""


def simulated(ranks: int, trained: list[set[int]]) -> State:
    """Train in one process; `trained` has the workers of each round. One that was missing begins afresh."""
    config = GPTConfig.named(ARGS.size)
    data = TrainingData("gpt", ARGS.batch_size, ARGS.seed, config.block_size)
    anchor = GPT(config, seed=ARGS.seed)
    outer = torch.optim.SGD(anchor.parameters(), lr=ARGS.outer_lr, momentum=0.9, nesterov=True)
    workers: dict[int, tuple[GPT, torch.optim.Optimizer]] = {}
    for number, names in enumerate(trained):
        workers = {name: worker for name, worker in workers.items() if name in names}
        for name in names - workers.keys():
            model = GPT(config, seed=7)
            workers[name] = model, AdamW(model.parameters(), lr=ARGS.lr)
        begin, end = number * ARGS.sync_every, min((number + 1) * ARGS.sync_every, ARGS.steps)
        for name, (model, optimizer) in workers.items():
            model.load_state_dict(anchor.state_dict())
            for step in range(begin, end):
                x, y = (part.chunk(ranks)[name] for part in data.batch(step))
                optimizer.zero_grad()
                loss_of(model(x), y).backward()
                optimizer.step()
        with torch.no_grad():
            everyones = zip(*(model.parameters() for model, _ in workers.values()), strict=True)
            for parameter, ends in zip(anchor.parameters(), everyones, strict=True):
                mean = torch.stack(ends).mean(0)
                parameter.grad = parameter - mean
                if end - begin < ARGS.sync_every:
                    parameter.copy_(mean)
        if end - begin == ARGS.sync_every:
            outer.step()
    return {name: parameter.detach() for name, parameter in anchor.named_parameters()}


def in_float64(ranks: int, trained: list[set[int]]) -> State:
    def work(cluster: Cluster) -> State:
        torch.set_default_dtype(torch.float64)
        return simulated(ranks, trained)

    return run_ranks(work, 1)[0]


def train(cluster: Cluster, disturb: Disturb, changes: dict[str, Any]) -> tuple[State, int]:
    """Return this rank's parameters in the end, and how often a rank has joined."""
    torch.set_default_dtype(torch.float64)
    torch.optim.AdamW = AdamW  # type: ignore[misc]
    args, made, before = ElasticDiLoCoArgs(**vars(ARGS) | changes), [], open_sockets()
    original = Survivors.__init__

    def noted(self: Survivors, *args: Any, **options: Any) -> None:
        made.append(self)
        original(self, *args, **options)

    Survivors.__init__ = noted  # type: ignore[method-assign]
    disturb(cluster)
    try:
        worker = train_elastic_diloco.main(cluster, args)
    except Dies as death:
        shut_down_connections(before)
        made.clear()
        death.__traceback__ = None
        close_store()
        cluster.store.get("may come back")
        worker = train_elastic_diloco.main(cluster, args)
    end = {name: parameter.detach() for name, parameter in worker.model.named_parameters()}
    return end, made.pop().joins


def close_store() -> None:
    """Close the store of a rank, to which nothing but its group refers any more, as its death would."""
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()


def end_as_simulated(
    ranks: int,
    trained: list[set[int]],
    victims: set[int],
    disturb: Disturb = lambda cluster: None,
    joins: int = 0,
    **changes: Any,
) -> None:
    """`victims` are killed and do not come back."""
    results = run_ranks(train, ranks, disturb, changes, collect_failures=True, timeout=90)
    expected = in_float64(ranks, trained)
    for rank, result in enumerate(results):
        if rank in victims:
            assert "killed by SIGKILL" in str(result), result
            continue
        assert not isinstance(result, RankError), result
        end, joined = result
        assert_same(end, expected, what=f"parameter of rank {rank}")
        assert joined == joins


def test_after_two_deaths_the_mean_is_over_those_who_are_left():
    trained = [{0, 1, 2, 3}, {0, 1, 3}, {0, 3}, {0, 3}, {0, 3}]
    end_as_simulated(4, trained, {1, 2}, kill=("2@3", "1@4"))


def raise_death(*_: Any, **__: Any) -> None:
    raise Dies


@pytest.mark.parametrize("late", [0, 1])
def test_a_worker_that_missed_a_synchronisation_copies_it_and_calls_those_who_train_already(late: int):
    """The other one trains until it is called, so the test would hang if it were called at the end only."""
    check = Survivors.check

    def until_called(self: Survivors, may_join: bool) -> None:
        while self.name == 0 and not self.coordinator.asking:
            self.coordinator.hear(1)
        if self.name > 0:
            self._rank_0.poll(None)
        check(self, may_join)

    def disturb(cluster: Cluster) -> None:
        if cluster.rank == late:  # as if its last messages had not arrived
            at_step(1, train_elastic_diloco, "all_reduce", and_then(interrupted))
        elif cluster.rank == 2:
            at_step(1, Worker, "synchronise", and_then(die))
        else:  # after its first step of the third round
            at_step(4, Survivors, "check", lambda original: until_called)

    end_as_simulated(3, [{0, 1, 2}, {0, 1, 2}, {0, 1}, {0, 1}, {0, 1}], {2}, disturb)


def let_join_in_round(number: int) -> None:
    """Let the rank that has died come back when rank 0 of the group is about to synchronise in a round."""
    made, begin, check = [], Worker.__init__, Survivors.check

    def noted(self: Worker, *args: Any, **options: Any) -> None:
        made.append(self)
        begin(self, *args, **options)

    def waits(self: Survivors, may_join: bool) -> None:
        if may_join and self.cluster.is_main and made[-1].rounds == number and not self.joins:
            self._store.underlying_store.set("may come back", "")
            while not self.coordinator.newcomers():
                pass
        check(self, may_join)

    Worker.__init__, Survivors.check = noted, waits  # type: ignore[method-assign]


def test_a_worker_that_comes_back_copies_the_anchor_and_trains_from_the_next_round_on():
    def disturb(cluster: Cluster) -> None:
        let_join_in_round(2)
        if cluster.rank == 2:
            at_step(3, Worker, "step", lambda original: raise_death)

    everyone, others = {0, 1, 2}, {0, 1}
    end_as_simulated(3, [everyone, others, others, everyone, everyone], set(), disturb, joins=1)


def test_without_a_launcher_a_worker_comes_back_through_the_store_of_rank_0():
    """The third process has the number of the second one, which has died."""
    environments = places([0, 1, 1], 2, MASTER_ADDR="127.0.0.1")

    def work(process: Cluster) -> tuple[State, int]:
        environment = environments[process.rank]
        set_variables(environment)
        if process.rank == 2:
            store = dist.TCPStore("127.0.0.1", environment["MASTER_PORT"], is_master=False)
            store.get("attempt_0/lab/may come back")
        return train(rendezvous.join(), lambda cluster: let_join_in_round(2), {"kill": ("1@3",)})

    first, killed, back = run_ranks(work, 3, backend=None, collect_failures=True, timeout=60)
    assert "killed by SIGKILL" in str(killed)
    expected = in_float64(2, [{0, 1}, {0}, {0}, {0, 1}, {0, 1}])
    for result in (first, back):
        assert not isinstance(result, RankError), result
        end, joins = result
        assert_same(end, expected, what="parameter")
        assert joins == 1


@pytest.mark.parametrize(("victim", "moment"), [(2, "_form"), (1, "catch_up")])
def test_a_death_during_a_join_leads_to_another_group(victim: int, moment: str):
    def disturb(cluster: Cluster) -> None:
        let_join_in_round(2)
        if cluster.rank == 2:
            at_step(3, Worker, "step", lambda original: raise_death)
        if cluster.rank == victim:  # the newcomer has formed the first group too, the other one two groups
            number = 1 if victim == 2 else 2
            at_step(number, Worker if moment == "catch_up" else Survivors, moment, lambda original: die)

    rest = {0, 1, 2} - {victim}
    end_as_simulated(3, [{0, 1, 2}, {0, 1}, rest - {2}, rest, rest], {victim}, disturb, joins=1, patience=5.0)


def test_if_rank_0_dies_the_others_end_with_a_sentence_and_it_cannot_come_back():
    def disturb(cluster: Cluster) -> None:
        if cluster.rank == 0:
            at_step(3, Worker, "step", lambda original: raise_death)

    def work(cluster: Cluster) -> str:
        with pytest.raises(WorkbookError) as error:
            train(cluster, disturb, {})
        cluster.store.set("may come back", "")
        return str(error.value)

    zero, *others = run_ranks(work, 3)
    assert "rank 0 cannot come back, because it coordinated the others" in zero
    assert all("rank 0 has died, and the others cannot go on without it" in other for other in others), others


def test_one_that_comes_back_after_the_end_is_told_so():
    def disturb(cluster: Cluster) -> None:
        if cluster.rank == 1:
            at_step(3, Worker, "step", lambda original: raise_death)

    def work(cluster: Cluster) -> str:
        if cluster.rank == 1:
            with pytest.raises(Complete) as error:
                train(cluster, disturb, {})
            return str(error.value)
        train(cluster, disturb, {})
        close_store()
        cluster.store.set("may come back", "")
        return ""

    assert "has come back too late: the others have ended" in run_ranks(work, 2)[1]
