"""Test which gradients share a bucket, and that gradients live in the buckets."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from data_parallel.train_bucket_overlap import Bucket, BucketDataParallel, fill
from lab.cluster import Cluster
from lab.units import MIB
from tests.equivalence import accumulate, mine, no_sync
from tests.on_ranks import on_ranks
from tests.tasks import gpt, text, text_loss

DTYPES = (torch.float32, torch.float64)


def parameter(num_bytes: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.empty(num_bytes // dtype.itemsize, dtype=dtype, device="meta"))


def filled(sizes: list[int], first_bytes: int, bucket_bytes: int) -> list[list[int]]:
    """Return the bytes of the parameters in each bucket."""
    buckets = fill([parameter(size) for size in sizes], first_bytes / MIB, bucket_bytes / MIB)
    return [[p.nbytes for p in bucket] for bucket in buckets]


def test_a_bucket_is_closed_when_it_reaches_its_cap_and_the_first_cap_is_separate():
    found = filled([40] * 9, 80, 130)
    assert found == [[40] * 2, [40] * 4, [40] * 3], "9 tensors of 40 bytes, and buckets of 80, 130, 130 bytes"


def test_a_parameter_larger_than_the_cap_closes_its_bucket():
    for sizes, expected in (([8, 400, 8, 8], [[8, 400], [8, 8]]), ([400, 8, 8], [[400], [8, 8]])):
        assert filled(sizes, 100, 100) == expected, f"tensors of {sizes} bytes, and buckets of 100 bytes"


@given(
    st.lists(st.tuples(st.integers(0, 9), st.sampled_from(DTYPES)), max_size=12),
    st.integers(1, 60),
    st.integers(1, 60),
)
def test_buckets_keep_the_order_have_one_dtype_each_and_are_filled_up_to_their_caps(
    sizes: list[tuple[int, torch.dtype]], first_bytes: int, bucket_bytes: int
):
    parameters = [parameter(8 * size, dtype) for size, dtype in sizes]
    buckets = fill(parameters, first_bytes / MIB, bucket_bytes / MIB)
    together = [p for bucket in buckets for p in bucket]
    assert [id(p) for p in together] == [id(p) for p in parameters]
    for k, bucket in enumerate(buckets):
        assert len({p.dtype for p in bucket}) == 1
        cap = first_bytes if k == 0 else bucket_bytes
        assert sum(p.nbytes for p in bucket[:-1]) < cap
        if k < len(buckets) - 1:
            is_full = sum(p.nbytes for p in bucket) >= cap
            told = "a bucket is closed before it has its cap, and not by a change of dtype"
            assert is_full or buckets[k + 1][0].dtype != bucket[0].dtype, told


@on_ranks(1)
def test_the_last_layers_come_first_and_only_the_first_bucket_is_small(cluster: Cluster):
    layers = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))  # 16 KiB each
    model = BucketDataParallel(layers, bucket_mb=1 / 16, first_mb=1 / 32)
    places = {p: i for i, p in enumerate(layers.parameters())}
    found = [[places[p] for p in bucket.views] for bucket in model.buckets]
    assert found == [[7, 6], [5, 4, 3, 2], [1, 0]]


def lies_in(gradient: Tensor, bucket: Bucket) -> bool:
    start = gradient.data_ptr() - bucket.flat.data_ptr()
    return 0 <= start <= bucket.flat.nbytes - gradient.nbytes


@on_ranks(2)
def test_gradients_are_views_of_the_buckets_however_they_are_zeroed(cluster: Cluster):
    for bucket_mb in (1e-6, 0.02, 4.0):
        model = BucketDataParallel(gpt(cluster.rank), bucket_mb=bucket_mb)
        for microbatches, set_to_none in ((1, True), (2, False), (2, True)):
            model.zero_grad(set_to_none)
            accumulate(model, text_loss, mine(cluster, text()), microbatches)
            for each in model.trained:
                assert sum(lies_in(each.grad, bucket) for bucket in model.buckets) == 1
                assert each.grad.stride() == each.stride()


def test_the_place_of_a_gradient_that_is_missing_is_filled_with_zeros():
    used, unused = nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(4))
    bucket = Bucket([used, unused])
    assert not bucket.flat.any() and bucket.missing == {used, unused}
    bucket.flat.fill_(7.0)  # numbers of the step before
    used.grad = torch.ones(2, 3)
    for each in (used, unused):
        bucket.move_in(each)
    assert bucket.flat.tolist() == [1.0] * 6 + [0.0] * 4
    assert used.grad is bucket.views[used] and unused.grad is bucket.views[unused]


class Copies(TorchDispatchMode):
    """This mode counts the calls of `copy_`."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten.copy_.default
        return func(*args, **(kwargs or {}))


@on_ranks(1)
def test_new_gradients_are_copied_into_the_bucket_once_and_views_are_not_copied(cluster: Cluster):
    model = BucketDataParallel(nn.Linear(3, 2))
    for set_to_none, expected in ((True, 2), (False, 0)):
        model.zero_grad(set_to_none)
        loss = model(torch.ones(1, 3)).sum()
        with no_sync(model), Copies() as copies:
            loss.backward()
        assert copies.count == expected
