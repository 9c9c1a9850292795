"""Measuring alpha and beta of an all-reduce: as exact as time allows, and no longer than that."""

import time

import pytest

from comm.cost import Link
from comm.wire import slow_link
from lab.ranks import run_ranks
from tests.comm.simulated_time import simulated_time
from training.calibrate import TINY_BYTES, measure_all_reduce, measure_flops


@pytest.mark.parametrize("link", [Link(1e-4, 8e-6), Link(0.05, 1 / 12.5e6)])
def test_a_slow_link_is_measured_in_seconds_and_alike_on_all_ranks(link: Link):
    def measured(cluster) -> tuple[float, Link]:
        with simulated_time(), slow_link.slowed(link):
            found = measure_all_reduce("ring")
            return time.perf_counter_ns() / 1e9, found

    (seconds, found), *others = run_ranks(measured, 2)
    assert all(other == found for _, other in others)
    assert seconds < 4
    assert link.alpha <= found.alpha <= link.alpha + TINY_BYTES * link.beta  # the tiny tensor has some
    assert found.beta == pytest.approx(link.beta, rel=1e-4)


def test_all_ranks_know_the_flops_of_all_together():
    one, other = run_ranks(lambda cluster: measure_flops(cluster.device), 2)
    assert one == other > 1e6
