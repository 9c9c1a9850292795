"""Wherever a rank dies, the survivors train as one process does: each step once, each with the full batch."""

import functools
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from comm.errors import CommError
from comm.membership import liveness
from comm.membership.survivors import Survivors
from hybrid_parallel.elastic import train_elastic
from hybrid_parallel.elastic.train_elastic import ElasticArgs, ElasticReplica
from lab.check import assert_same
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.ranks import RankError, run_ranks
from training.deaths import Deaths

# 7 examples are divided evenly among no group but that of one rank.
ARGS = ElasticArgs(steps=6, batch_size=7, size="tiny", json=True, patience=5.0)
State = dict[str, Tensor]
Disturb = Callable[[Cluster], None]


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def train(cluster: Cluster, args: ElasticArgs, disturb: Disturb) -> tuple[State, State]:
    """Return this rank's gradients of all steps, and in the end parameters and Adam's state, in float64."""
    torch.set_default_dtype(torch.float64)
    gradients: State = {}
    step = ElasticReplica.step

    def noted(self: ElasticReplica, *batch: Any) -> Tensor:
        loss = step(self, *batch)
        for name, parameter in self.model.named_parameters():
            assert parameter.grad is not None
            gradients[f"step {self.steps - 1}: {name}"] = parameter.grad.clone()
        return loss

    ElasticReplica.step = noted  # type: ignore[method-assign]
    disturb(cluster)
    replica = train_elastic.main(cluster, args)
    end = {name: parameter.detach() for name, parameter in replica.model.named_parameters()}
    for name, parameter in replica.model.named_parameters():
        end |= {f"{name}: {key}": value for key, value in replica.optimizer.state[parameter].items()}
    return gradients, end


@functools.cache
def one_process() -> tuple[State, State]:
    return run_ranks(train, 1, ARGS, lambda cluster: None)[0]


def survivors_equal_one_process(
    ranks: int, victims: set[int], disturb: Disturb = lambda cluster: None, **changes: Any
) -> None:
    args = ElasticArgs(**vars(ARGS) | changes)
    results = run_ranks(train, ranks, args, disturb, collect_failures=True, timeout=60)
    gradients, end = one_process()
    for rank, result in enumerate(results):
        if rank in victims:
            assert "killed by SIGKILL" in str(result), result
            continue
        assert not isinstance(result, RankError), result
        own, own_end = result
        # A rank that takes over the state of another has no gradient of its own for that step.
        assert_same(own, {name: gradients[name] for name in own})
        assert_same(own_end, end, what="parameter or state")
    every = [set(result[0]) for rank, result in enumerate(results) if rank not in victims]
    assert set().union(*every) == set(gradients)


def test_two_deaths_leave_every_gradient_that_of_one_process():
    survivors_equal_one_process(4, {1, 2}, kill=("2@2", "1@4"))


def test_a_rank_has_died_if_the_kernel_gives_up_its_connection_as_to_a_machine_that_has_gone():
    def times_out(connection: Any, receive: Callable[..., bytes], *args: Any) -> bytes:
        try:
            return receive(connection, *args)
        except EOFError:
            raise TimeoutError from None

    def disturb(cluster: Cluster) -> None:
        receive = liveness.Connection.recv_bytes
        liveness.Connection.recv_bytes = functools.partialmethod(times_out, receive)  # type: ignore

    survivors_equal_one_process(3, {2}, disturb, kill=("2@2",))


def test_if_rank_0_dies_the_others_end_with_a_sentence():
    results = run_ranks(
        train, 3, ElasticArgs(**vars(ARGS) | {"kill": ("0@2",)}), lambda cluster: None, collect_failures=True
    )
    assert "killed by SIGKILL" in str(results.pop(0))
    sentence = "WorkbookError: rank 0 has died, and the others cannot go on without it"
    assert all(sentence in str(end) for end in results), results


def at_step(
    number: int, owner: Any, name: str, change: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> None:
    """Replace a function, but only for its `number`-th call, counted from 0."""
    original, calls = getattr(owner, name), iter(range(1 << 30))

    def replaced(*args: Any, **kwargs: Any) -> Any:
        return (change(original) if next(calls) == number else original)(*args, **kwargs)

    setattr(owner, name, replaced)


def and_then(last: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def change(original: Callable[..., Any]) -> Callable[..., Any]:
        def both(*args: Any, **kwargs: Any) -> None:
            original(*args, **kwargs)
            last()

        return both

    return change


def interrupted() -> None:
    raise CommError("the connection is lost")


def test_a_rank_that_missed_a_step_which_others_have_taken_takes_over_their_state_and_takes_it_once():
    def disturb(cluster: Cluster) -> None:
        if cluster.rank == 1:  # as if its last messages had not arrived
            at_step(2, train_elastic, "all_reduce", and_then(interrupted))
        if cluster.rank == 2:
            at_step(2, torch.optim.AdamW, "step", and_then(die))

    survivors_equal_one_process(3, {2}, disturb)


def test_a_death_inside_the_all_reduce_in_the_last_step_or_after_it_leaves_each_step_taken_once():
    def and_dies_before_its_end(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **options: (original(*args, **options, async_op=True), die())

    def disturb(cluster: Cluster) -> None:
        if cluster.rank == 0:  # in the last step, as one was repeated; it takes over the state of rank 4
            at_step(ARGS.steps, train_elastic, "all_reduce", and_then(interrupted))
        if cluster.rank == 1:
            at_step(1, train_elastic, "all_reduce", and_dies_before_its_end)
        if cluster.rank == 2:
            at_step(0, train_elastic, "replica_digests", lambda original: die)
        if cluster.rank == 3:
            at_step(ARGS.steps - 1, torch.optim.AdamW, "step", lambda original: die)

    survivors_equal_one_process(5, {1, 2, 3}, disturb)


@pytest.mark.parametrize("moment", ["_agree", "_form", "_state_of"])
def test_a_death_during_the_recovery_leads_to_another_recovery(moment: str):
    def disturb(cluster: Cluster) -> None:
        if cluster.rank == 1:
            owner = ElasticReplica if moment == "_state_of" else Survivors
            at_step(0 if moment == "_agree" else 1, owner, moment, lambda original: die)
        if cluster.rank == 2 and moment == "_state_of":
            at_step(2, train_elastic, "all_reduce", and_then(interrupted))
        if cluster.rank == 3:
            at_step(2, torch.optim.AdamW, "step", and_then(die))

    survivors_equal_one_process(4, {1, 3}, disturb)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_hangs_is_named_by_the_others_which_end(victim: int):
    def paused(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **options: (os.kill(os.getpid(), signal.SIGSTOP), original(*args, **options))

    def work(cluster: Cluster) -> str:
        if cluster.rank == victim:
            cluster.store.set("pid", str(os.getpid()))
            at_step(2, train_elastic, "all_reduce", paused)
        with pytest.raises(WorkbookError) as error:
            train_elastic.main(cluster, ElasticArgs(**vars(ARGS) | {"patience": 1.0}))
        if cluster.store.add("ended", 1) == 2:
            os.kill(int(cluster.store.get("pid")), signal.SIGKILL)
        return str(error.value)

    ends = run_ranks(work, 3, collect_failures=True, timeout=60)
    assert "killed by SIGKILL" in str(ends.pop(victim))
    assert all(f"rank {victim} has not answered within 1 s, but still exists" in end for end in ends), ends


def test_a_kill_that_names_no_step_no_rank_or_all_ranks_is_refused():
    for kill, sentence in (
        (("2",), "--kill 2: write RANK@STEP, with a rank from 0 to 1"),
        (("2@1",), "--kill 2@1: write RANK@STEP"),
        (("0@1", "1@3"), "--kill names all ranks; one must stay alive"),
    ):
        with pytest.raises(WorkbookError, match=sentence):
            Deaths(kill, 2)
