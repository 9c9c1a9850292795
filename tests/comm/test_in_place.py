"""An all-reduce of shared tensors is right, leaves nothing behind, and is refused where it cannot be."""

import gc
import itertools
import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from comm import collectives, cost, shared_tensors
from comm.algorithms import in_place
from comm.transport import segment
from comm.wire import shared_segment
from lab.ranks import run_ranks
from lab.replace import replaced
from lab.trace.ledger import LEDGER, Entry
from tests.comm.collective_cases import REDUCTIONS, Case, has_a_meaning, reduced, values
from tests.comm.mismatches import error_text
from tests.comm.segments import short_segments

pytestmark = pytest.mark.skipif(not segment.is_possible(), reason="memory without a name is Linux's")

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool)
SIZES = (0, 1, 2, 7, 101)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 7])
def test_every_reduction_of_every_dtype_and_size_equals_the_reference(n: int):
    def reduce_all(cluster) -> None:
        for dtype in DTYPES:
            memory = shared_tensors.zeros(sum(SIZES), dtype)
            for op, (seed, place) in itertools.product(REDUCTIONS, enumerate(memory.split(SIZES))):
                case = Case("all_reduce", "in_place", len(place), dtype=dtype, reduction=op, seed=seed)
                if not has_a_meaning(case):
                    continue
                inputs = [values(case, rank, len(place)) for rank in range(n)]
                place.copy_(inputs[cluster.rank])
                collectives.all_reduce(place, op, pattern="in_place")
                expected = reduced(inputs, op)
                assert torch.equal(place, expected), f"{op} of {dtype}: {place}, expected {expected}"

    with short_segments(32):  # 101 elements are many pieces
        run_ranks(reduce_all, n)


def test_the_sum_of_random_floats_is_bitwise_the_same_on_every_rank():
    def reduce_one(cluster) -> bytes:
        x = shared_tensors.zeros(1003)
        x.copy_(torch.randn(1003, generator=torch.Generator().manual_seed(cluster.rank)))
        collectives.all_reduce(x, pattern="in_place")
        return x.numpy().tobytes()

    assert len(set(run_ranks(reduce_one, 4))) == 1


def test_a_mean_of_float16_that_fits_does_not_overflow_though_the_sum_would():
    def mean(cluster) -> None:
        x = shared_tensors.zeros(5, torch.float16).fill_(40000.0)
        collectives.all_reduce(x, "mean", pattern="in_place")
        assert (x == 40000.0).all()

    run_ranks(mean, 3)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_counted_bytes_equal_the_formula(n: int):
    def count(cluster) -> None:
        for numel in (1, n, 101, 300_000):
            x = shared_tensors.zeros(numel)
            LEDGER.clear()
            collectives.all_reduce(x, pattern="in_place")
            got = LEDGER.total()
            assert got == cost.per_rank("all_reduce", "in_place", numel, 4, n, cluster.rank), (numel, got)
            assert Entry("all_reduce", "header") in LEDGER.rows()

    run_ranks(count, n)


def test_groups_share_memory_of_their_own_and_operations_may_run_in_the_background():
    def reduce_two(cluster) -> None:
        pair, others = dist.new_group([0, 2]), dist.new_group([1, 3])
        group = others if cluster.rank % 2 else pair
        everyone, few = shared_tensors.zeros(50_000), shared_tensors.zeros(50_000, group=group)
        for step in range(20):
            everyone.fill_(cluster.rank + step), few.fill_(cluster.rank + step)
            handles = [
                collectives.all_reduce(everyone, async_op=True, pattern="in_place"),
                collectives.all_reduce(few, group=group, async_op=True, pattern="in_place"),
            ]
            for handle in handles:
                handle.wait()
            assert (everyone == 6 + 4 * step).all()
            assert (few == (4 if cluster.rank % 2 else 2) + 2 * step).all()
        text = error_text(lambda: collectives.all_reduce(few, group=group, pattern="in_place"))
        assert text == ""
        text = error_text(lambda: collectives.all_reduce(few, pattern="in_place"))  # of another group
        assert "needs a tensor that all ranks share" in text

    run_ranks(reduce_two, 4)


def test_a_rank_returns_only_when_all_ranks_have_written_their_chunk():
    def reduce_slowly(cluster) -> None:
        def slowly(*arguments) -> None:
            time.sleep(0.2 * cluster.rank)
            reduce_piece(*arguments)

        x, reduce_piece = shared_tensors.zeros(300), in_place._reduce
        x.fill_(1.0)
        with replaced("comm.algorithms.in_place._reduce", slowly):
            collectives.all_reduce(x, pattern="in_place")
            assert (x == 3).all(), "a rank returned before another one had written its chunk"

    run_ranks(reduce_slowly, 3)


def test_a_rank_reads_the_others_only_when_all_have_arrived():
    def come_late(cluster) -> None:
        x = shared_tensors.zeros(300)
        collectives.barrier()
        time.sleep(0.2 * cluster.rank)
        x.fill_(1.0)
        collectives.all_reduce(x, pattern="in_place")
        assert (x == 3).all(), "a rank was read before it had called the all-reduce"

    run_ranks(come_late, 3)


def test_an_ordinary_tensor_and_tensors_at_different_places_are_refused_on_all_ranks():
    def refuse(cluster) -> list[str]:
        x, ordinary = shared_tensors.zeros(10), torch.ones(5)
        first, second = x.split(5)

        def text_of(tensor: torch.Tensor, on_rank_0: torch.Tensor) -> str:
            mine = tensor if cluster.rank else on_rank_0
            return error_text(lambda: collectives.all_reduce(mine, pattern="in_place"))

        texts = [
            text_of(ordinary, ordinary),
            text_of(x[::2], x[::2]),
            text_of(second, first),
            text_of(first, ordinary),
            error_text(lambda: collectives.broadcast(first, pattern="in_place")),
        ]
        first.fill_(1.0)
        collectives.all_reduce(first, pattern="in_place")
        assert (first == 3).all()
        return texts

    first, *others = run_ranks(refuse, 3, group_timeout=10)
    assert all(other == first for other in others)
    not_shared, strided, apart, mixed, no_pattern = first
    assert "needs a tensor that all ranks share" in not_shared
    assert "needs a tensor that all ranks share" in strided
    assert "must lie at the same place" in apart
    assert "must lie at the same place" in mixed
    assert "broadcast has no pattern 'in_place'" in no_pattern


def test_ranks_that_ask_for_different_sizes_get_one_sentence():
    def ask(cluster) -> str:
        return error_text(lambda: shared_tensors.zeros(5 + cluster.rank))

    assert set(run_ranks(ask, 2)) == {
        "All ranks must share tensors of the same size; they ask for [20, 24] bytes."
    }


def test_a_full_memory_is_a_sentence_on_all_ranks_and_the_group_goes_on():
    def ask(cluster) -> str:
        def full(*_) -> None:
            raise OSError(28, "No space left on device")

        with replaced("os.posix_fallocate", full):
            text = error_text(lambda: shared_tensors.zeros(5))
        assert shared_tensors.are_shared(shared_tensors.zeros(5))
        return text

    (text,) = set(run_ranks(ask, 2))
    assert text.startswith("There is not enough memory for 2 shared tensors of 20 bytes (No space left on")


def test_where_one_rank_cannot_open_the_memory_all_get_ordinary_tensors():
    def ask(cluster) -> bool:
        def refused(*_) -> None:
            raise OSError(13, "Permission denied")

        with replaced("comm.wire.shared_segment.open_of", refused if cluster.rank == 2 else OPEN_OF):
            x = shared_tensors.zeros(5)
        assert (x == 0).all() and x.shape == (5,)
        return shared_tensors.are_shared(x)

    assert run_ranks(ask, 3) == [False] * 3


OPEN_OF = shared_segment.open_of


def test_memory_that_is_another_segment_or_none_is_not_opened():
    descriptor, memory = shared_segment.make(2, 100)
    nonce, pid = memory[: shared_segment.NONCE_BYTES], os.getpid()
    unsealed = os.memfd_create("other")
    os.truncate(unsealed, len(memory))
    reading, writing = os.pipe()
    try:
        assert shared_segment.open_of(pid, descriptor, nonce, 2, 100)[: len(nonce)] == nonce
        for number, random, num_bytes in (
            (descriptor, b"\0" * len(nonce), 100),
            (descriptor, nonce, 1 << 20),
            (unsealed, b"\0" * len(nonce), 100),
            (reading, nonce, 100),
            (1 << 20, nonce, 100),
        ):
            with pytest.raises(OSError):
                shared_segment.open_of(pid, number, random, 2, num_bytes)
    finally:
        for one in (descriptor, unsealed, reading, writing):
            os.close(one)


def test_freed_tensors_leave_neither_memory_nor_descriptors_behind():
    def make_and_free(cluster) -> None:
        def mapped() -> int:
            return Path("/proc/self/maps").read_text().count("memfd:workbook (deleted)")

        def descriptors() -> int:
            return len(os.listdir("/proc/self/fd"))

        collectives.all_reduce(shared_tensors.zeros(5), pattern="in_place")  # connects the ranks
        gc.collect()
        before = mapped(), descriptors()
        for _ in range(5):
            x = shared_tensors.zeros(5_000)
            part = x[100:200]
            del x
            collectives.all_reduce(part, pattern="in_place")
            assert mapped() > before[0]
            del part
            gc.collect()
            assert (mapped(), descriptors()) == before

    run_ranks(make_and_free, 2)


def test_a_rank_that_dies_while_it_reduces_is_an_error_of_the_others():
    def one_dies(cluster) -> str:
        x = shared_tensors.zeros(300)
        collectives.barrier()
        if cluster.rank == 1:
            with replaced("comm.algorithms.in_place._reduce", die):
                collectives.all_reduce(x, pattern="in_place")
        return error_text(lambda: collectives.all_reduce(x, pattern="in_place"))

    texts = run_ranks(one_dies, 3, collect_failures=True, group_timeout=20)
    for rank in (0, 2):
        assert "has died or left" in str(texts[rank]), texts[rank]


def die(*_) -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
