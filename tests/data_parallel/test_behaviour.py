"""Grade data parallel wrappers by what they do: gradients, messages, and messages in the backward."""

from collections.abc import Callable

import torch
from torch import nn

from comm.collectives import Group
from comm.cost import Link
from comm.wire import slow_link
from data_parallel.train_bucket_overlap import BucketDataParallel
from data_parallel.train_naive import NaiveDataParallel
from lab.check import assert_same, gradients, parameters
from lab.cluster import Cluster
from lab.ranks import run_ranks
from lab.trace import timeline
from lab.trace.ledger import LEDGER
from lab.trace.metronome import Metronome
from tests.data_parallel.equivalence import (
    EitherWay,
    Odd,
    Wrap,
    X,
    compare_with_one_process,
    examples,
    in_pairs,
    layers,
    mean_square,
    no_sync,
    odd_loss,
    one_process,
)

KIB = 1 / 1024  # in MiB


def naive(module: nn.Module, group: Group = None) -> nn.Module:
    return NaiveDataParallel(module, group)


def buckets(module: nn.Module, group: Group = None, bucket_mb: float = 0.5 * KIB) -> nn.Module:
    return BucketDataParallel(module, group, bucket_mb=bucket_mb)


def of_two_ranks(cluster: Cluster, wrap: Wrap) -> None:
    compare_with_one_process(cluster, wrap, layers, lambda m, x, _: mean_square(m, x), (X, X), (1,))


def of_odd_models(cluster: Cluster, wrap: Wrap) -> None:
    odd = examples(cluster.world_size)
    what = "tied, frozen and unused layers"
    compare_with_one_process(cluster, wrap, Odd, odd_loss, odd, (1, 2, 1), what)


def of_pairs(cluster: Cluster, wrap: Callable[..., nn.Module]) -> None:
    """Compare each of two groups, which have different data and weights, with one process."""
    group, number, rank = in_pairs(cluster)
    x = torch.randn(2, 2, 3, generator=torch.Generator().manual_seed(number)).double()
    reference, model = layers(number), wrap(layers(cluster.rank), group)
    what = f"in the group of ranks {number} and {number + 2}"
    assert_same(parameters(model.module), parameters(reference), 0, f"initial parameter {what}")
    expected = one_process(reference, lambda m: mean_square(m, x.flatten(0, 1)))
    mean_square(model, x[rank]).backward()
    model.finish_gradient_sync()
    assert_same(gradients(model.module), expected, what=f"gradient {what},")


def messages_of(wrap: Wrap) -> tuple[int, int]:
    """Return how many messages a rank sends in a step of 8 layers of 1 KiB, and in no_sync() before it."""
    model = wrap(nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(8))))
    counts = [_sent()]
    with no_sync(model):
        model(torch.ones(1, 16)).sum().backward()
    counts.append(_sent())
    model(torch.ones(1, 16)).sum().backward()
    model.finish_gradient_sync()
    return _sent() - counts[1], counts[1] - counts[0]


def _sent() -> int:
    rows = LEDGER.rows().items()
    return sum(row.messages_sent for entry, row in rows if entry.pattern != "header")


def test_naive_has_the_gradients_of_one_process():
    run_ranks(of_two_ranks, 2, naive)


def test_naive_is_right_for_tied_frozen_and_unused_layers_and_for_microbatches():
    run_ranks(of_odd_models, 3, naive)


def test_naive_averages_over_the_ranks_of_its_group_only():
    run_ranks(of_pairs, 4, naive)


def test_naive_reduces_each_parameter_once():
    def work(cluster: Cluster) -> None:
        sent, n = messages_of(naive)[0], cluster.world_size
        assert sent == 8 * 2 * (n - 1), (
            f"a step sent {sent} messages for 8 parameters on {n} ranks, and not 2(n-1) = {2 * (n - 1)} each"
        )

    run_ranks(work, 3)


def test_buckets_have_the_gradients_of_one_process():
    run_ranks(of_two_ranks, 2, buckets)


def test_buckets_are_right_for_tied_frozen_and_unused_layers_and_for_microbatches():
    run_ranks(of_odd_models, 3, buckets)


def test_buckets_are_right_where_a_rank_computes_gradients_in_another_order():
    def work(cluster: Cluster) -> None:
        def make(seed: int) -> nn.Module:
            return EitherWay(seed, backwards=cluster.rank == 1)

        one_each = lambda module: buckets(module, bucket_mb=1e-6)  # noqa: E731
        compare_with_one_process(cluster, one_each, make, lambda m, x, _: mean_square(m, x), (X, X), (1,))

    run_ranks(work, 2, timeout=20)


def test_buckets_average_over_the_ranks_of_their_group_only():
    run_ranks(of_pairs, 4, buckets)


def test_a_message_carries_a_bucket_and_no_sync_sends_nothing():
    def work(cluster: Cluster) -> None:
        n = cluster.world_size
        sent, too_early = messages_of(lambda module: buckets(module, bucket_mb=2 * KIB))
        assert too_early == 0, f"a backward in no_sync() sent {too_early} messages, and not 0"
        assert sent == 4 * 2 * (n - 1), (
            f"a step sent {sent} messages for 8 KiB in buckets of 2 KiB on {n} ranks, and not "
            f"4 times 2(n-1) = {4 * 2 * (n - 1)}"
        )

    run_ranks(work, 2)


def test_buckets_are_sent_while_the_backward_computes():
    def work(cluster: Cluster) -> None:
        layers = nn.ParameterList(torch.zeros(8) for _ in range(4))
        with slow_link.slowed(Link(0.004, 0.0)):
            module = Metronome(layers, [[layer] for layer in layers], 0.01, vocab_size=2)
            model = buckets(module, bucket_mb=1e-6)
            timeline.start_recording()
            loss = model(torch.zeros(1, 1)).sum()
            with timeline.span("backward", "backward"):
                loss.backward()
            model.finish_gradient_sync()
            timeline.stop_recording()
        events = timeline.recorded()
        (end,) = (event.end_ns for event in events if event.kind == "backward")
        early = [event for event in events if event.kind == "communication" and event.start_ns < end]
        assert early, "all messages left after the backward, and not while it computed"

    run_ranks(work, 2)
