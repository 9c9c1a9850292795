"""The clock of the metronome says when a device would have done what its host asks of it."""

from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from torch import Tensor

from pipeline_parallel.clock import Clock, ClockRunner

MS = 1_000_000


class Host:
    """Is a host whose time passes only when the test says so, or when it sleeps."""

    def __init__(self) -> None:
        self.now = 5_000 * MS

    def perf_counter_ns(self) -> int:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += round(seconds * 1e9)


@pytest.fixture
def host() -> Iterator[Host]:
    host = Host()
    with mock.patch("pipeline_parallel.clock.time", host):
        yield host


def runner(clock: Clock, tick_ms: float = 10.0, like: Tensor | None = None) -> ClockRunner:
    like = torch.empty(2, 3, device="meta") if like is None else like
    stage = ClockRunner(clock, like, like, tick_ms / 1e3)
    stage.begin_step()
    return stage


def spans(*stages: ClockRunner) -> list[float]:
    """Start and end of the last pass in ms since the host's beginning."""
    start, end = stages[0].last_span() or (0, 0)
    return [start / MS - 5_000, end / MS - 5_000]


def test_a_forward_takes_one_tick_and_a_backward_two(host: Host):
    stage = runner(Clock())
    stage.forward(0, torch.zeros(1))
    assert spans(stage) == [0, 10]
    stage.backward(0, None)
    assert spans(stage) == [10, 30]
    stage.backward_input(1, None)
    stage.backward_weight(1)
    assert spans(stage) == [40, 50]
    assert host.now == 5_050 * MS


def test_a_host_that_comes_late_holds_up_no_device_whose_input_was_there(host: Host):
    stage = runner(Clock())
    stage.forward(0, torch.zeros(1))
    host.now += 3 * MS
    stage.forward(1, torch.zeros(1))
    assert spans(stage) == [10, 20]
    assert host.now == 5_020 * MS


def test_a_device_whose_host_had_to_wait_for_the_input_begins_when_it_has_come(host: Host):
    stage = runner(Clock())
    stage.forward(0, torch.zeros(1))
    host.now += 3 * MS
    stage.add_wait(2e-3)
    stage.forward(1, torch.zeros(1))
    assert spans(stage) == [13, 23]


def test_on_a_gpu_the_host_waits_where_it_reads_and_the_pass_begins_when_the_input_has_come(host: Host):
    class Arriving(Tensor):
        """It has been waited for by a stream alone, and gets here 4 ms after it is read."""

        is_cuda = True

        def __int__(self) -> int:
            host.now += 4 * MS
            return int(self.as_subclass(Tensor))

    stage, y = runner(Clock()), torch.zeros(2, 3)
    stage.forward(0, torch.zeros(1))
    stage.forward(1, y.as_subclass(Arriving).requires_grad_())
    assert spans(stage) == [14, 24]


def test_no_pass_begins_before_its_input_was_made_on_another_rank(host: Host):
    giver, taker = runner(Clock()), runner(Clock())
    y = giver.forward(0, torch.zeros(1)).requires_grad_()
    host.now = 5_012 * MS
    taker.forward(0, y)
    assert spans(taker) == [10, 20]
    dx = taker.backward(0, None)
    host.now = 5_043 * MS
    giver.backward(0, dx)
    assert spans(giver) == [40, 60]


def test_another_machines_clock_may_say_anything(host: Host):
    stage, y = runner(Clock()), torch.zeros(2, 3)
    y.view(-1).view(torch.uint8)[:8] = torch.tensor([9_000 * MS]).view(torch.uint8)
    host.now += MS
    stage.forward(0, y.requires_grad_())
    assert spans(stage) == [1, 11]


def test_stages_of_one_rank_share_its_device(host: Host):
    clock = Clock()
    first, second = runner(clock, 10.0), runner(clock, 5.0)
    first.forward(0, torch.zeros(1))
    second.forward(0, torch.zeros(1))
    assert spans(second) == [10, 15]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_what_is_passed_on_has_the_true_shape_and_the_loss_is_a_number(host: Host, dtype: torch.dtype):
    like = torch.empty(4, 5, 6, dtype=dtype, device="meta")
    stage = runner(Clock(), like=like)
    for made in (stage.forward(0, torch.zeros(1)), stage.backward(0, None), stage.backward_input(0, None)):
        assert (made.shape, made.dtype) == (like.shape, dtype)
    assert stage.forward(0, torch.zeros(1), torch.zeros(1)).shape == ()
    tiny = runner(Clock(), like=torch.empty(1, device="meta"))
    assert tiny.forward(0, tiny.backward(0, None).requires_grad_()).tolist() == [0.0]
