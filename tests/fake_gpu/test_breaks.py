"""Test that the rehearsal finds lessons which are right on the CPU and wrong on a GPU."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from comm import point_to_point
from comm.collectives import all_reduce
from comm.native import NativeHandle
from comm.wire.wire import Wire
from lab.cluster import Cluster
from lab.ranks import RankError
from lab.replace import replaced
from tests.fake_gpu import test_run_modes as run_modes
from tests.fake_gpu import test_techniques as techniques
from tests.fake_gpu.ranks import on_gpus
from tests.wrappers import named


def hook_that_does_not_know_the_stream(
    state: Any, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    gradients = bucket.buffer()
    done: torch.futures.Future = torch.futures.Future()
    handle = all_reduce(gradients, op="mean", group=state.group, async_op=True, pattern="torch")
    handle.when_done(lambda error: done.set_result(gradients))
    return done


def wait_for_nothing(self: NativeHandle) -> None:
    self._work = None


def plain_messages(self: Wire, outgoing: torch.Tensor, dst: int, incoming: torch.Tensor, src: int) -> list:
    return [self.irecv(incoming, src), self.isend(outgoing, dst)]


@pytest.fixture
def fails(capfd: pytest.CaptureFixture[str]) -> Callable[..., None]:
    """`fails(path, break, test, message)`: with the break in the lesson, the test ends with that message."""

    def check(path: str, break_: Any, test: Callable[[], object], message: str) -> None:
        with replaced(path, break_), pytest.raises(RankError) as error:
            test()
        assert message in str(error.value) + capfd.readouterr().err

    return check


def test_with_a_future_without_a_device_ddp_reads_gradients_before_they_are_reduced(fails):
    fails(
        "data_parallel.train_ddp.through_comm",
        hook_that_does_not_know_the_stream,
        lambda: techniques.test_data_parallel_equals_one_process(named("ddp")),
        "memory that all_reduce writes to, and its stream has not waited for that",
    )


@pytest.mark.parametrize(
    "test",
    [
        *(
            partial(techniques.test_data_parallel_equals_one_process, named(name))
            for name in ("naive", "buckets")
        ),
        *(partial(techniques.test_zero_equals_one_process, named(stage)) for stage in ("zero2", "zero3")),
    ],
)
def test_a_missing_wait_is_noticed_before_memory_is_read_or_freed(fails, test):
    fails("comm.native.NativeHandle.end", wait_for_nothing, test, "its stream has not waited for that")


trains_in_int8 = partial(
    techniques.test_a_script_trains_on_gpus_as_on_cpus,
    "data_parallel_compressed --compress int8",
    ranks=2,
)


def test_a_thread_that_does_not_wait_for_what_the_main_thread_has_launched_is_noticed(fails):
    hand_over = "comm.background.handover_of"
    fails(hand_over, lambda tensors: None, trains_in_int8, "its stream has not waited for that")


@contextmanager
def taken_without_waiting_for_the_end(device: torch.device, event: torch.cuda.Event) -> Iterator[None]:
    with torch.cuda.stream(torch.cuda.Stream(device)):
        event.synchronize()
        yield


def test_a_thread_whose_kernels_the_main_thread_does_not_wait_for_is_noticed(fails):
    fails("comm.wire.staging._taken", taken_without_waiting_for_the_end, trains_in_int8, "on another stream")


def test_a_resumed_fused_optimizer_that_counts_its_steps_on_the_host_is_noticed(fails, tmp_path):
    fails(
        "training.state_shards._zeros_like",
        lambda saved, kind, shard: torch.zeros_like(shard.tensor) if saved.shape else torch.zeros(()),
        partial(
            run_modes.test_a_run_resumes_from_its_checkpoint,
            "data_parallel/train_bucket_overlap.py",
            tmp_path,
        ),
        "Expected all tensors to be on the same device",
    )


def test_pairs_that_are_connected_at_the_first_message_hang_a_pipeline(fails, monkeypatch):
    monkeypatch.setenv("FAKE_TIMEOUT", "3")
    test = partial(techniques.test_a_pipeline_equals_one_process, "gpipe", 2, 2)
    connect_none = lambda self, pairs: None  # noqa: E731
    fails("comm.channels.Channels._connect", connect_none, test, "waits in ncclCommInitRank")


def test_two_ranks_that_post_their_receives_first_hang(fails):
    def turn(cluster: Cluster) -> None:
        incoming = torch.zeros(3, device=cluster.device)
        point_to_point.ring_non_blocking(torch.ones_like(incoming), incoming)
        assert incoming.tolist() == [1.0] * 3

    on_gpus(turn)
    test = lambda: on_gpus(turn, FAKE_TIMEOUT="3")  # noqa: E731
    fails("comm.wire.gloo_wire.GlooWire.batch", plain_messages, test, "a deadlock")
