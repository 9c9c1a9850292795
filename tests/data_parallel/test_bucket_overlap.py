import io

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from data_parallel.flat import fill
from data_parallel.train_bucket_overlap import Bucket, BucketDataParallel
from lab.check import assert_same, gradients, module_digest, reference_gradients
from lab.cluster import Cluster
from lab.models.model import MLP
from lab.ranks import run_ranks
from lab.trace.ledger import LEDGER, Entry, Traffic
from tests.data_parallel.equivalence import (
    EitherWay,
    accumulate,
    examples,
    gpt,
    mean_square,
    mine,
    odd_loss,
    text,
    text_loss,
)

DTYPES = (torch.float32, torch.float64)


def parameter(num_bytes: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.empty(num_bytes // dtype.itemsize, dtype=dtype, device="meta"))


def test_a_bucket_is_closed_when_it_reaches_its_cap_and_the_first_cap_is_separate():
    parameters = [parameter(40) for _ in range(9)]
    assert fill(parameters, 80, 130) == [[0, 1], [2, 3, 4, 5], [6, 7, 8]]


def test_a_parameter_larger_than_the_cap_closes_its_bucket():
    assert fill([parameter(size) for size in (8, 400, 8, 8)], 100, 100) == [[0, 1], [2, 3]]
    assert fill([parameter(size) for size in (400, 8, 8)], 100, 100) == [[0], [1, 2]]


@given(
    st.lists(st.tuples(st.integers(0, 9), st.sampled_from(DTYPES)), max_size=12),
    st.integers(1, 60),
    st.integers(1, 60),
)
def test_buckets_keep_the_order_have_one_dtype_each_and_are_filled_up_to_their_caps(
    sizes: list[tuple[int, torch.dtype]], first_bytes: int, bucket_bytes: int
):
    parameters = [parameter(8 * size, dtype) for size, dtype in sizes]
    buckets = fill(parameters, first_bytes, bucket_bytes)
    assert [i for bucket in buckets for i in bucket] == list(range(len(parameters)))
    for k, bucket in enumerate(buckets):
        assert len({parameters[i].dtype for i in bucket}) == 1
        cap = first_bytes if k == 0 else bucket_bytes
        held = [parameters[i].nbytes for i in bucket]
        assert sum(held[:-1]) < cap
        if k < len(buckets) - 1:
            following = parameters[buckets[k + 1][0]]
            assert sum(held) >= cap or following.dtype != parameters[bucket[0]].dtype


def test_only_the_first_bucket_is_small():
    def work(cluster: Cluster) -> None:
        layers = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))  # 16 KiB each
        model = BucketDataParallel(layers, bucket_mb=1 / 16, first_mb=1 / 32)
        assert [len(bucket.views) for bucket in model.buckets] == [2, 4, 2]

    run_ranks(work, 1)


def lies_in(gradient: Tensor, bucket: Bucket) -> bool:
    start = gradient.data_ptr() - bucket.flat.data_ptr()
    return gradient.is_contiguous() and 0 <= start <= bucket.flat.nbytes - gradient.nbytes


def assert_gradients_live_in_buckets(model: BucketDataParallel) -> None:
    assert sum(len(bucket.views) for bucket in model.buckets) == len(model.trained)
    for parameter in model.trained:
        assert sum(lies_in(parameter.grad, bucket) for bucket in model.buckets) == 1


def test_gradients_are_views_of_the_buckets_however_they_are_zeroed():
    def work(cluster: Cluster) -> None:
        for bucket_mb in (1e-6, 0.02, 4.0):
            model = BucketDataParallel(gpt(cluster.rank), bucket_mb=bucket_mb)
            for set_to_none in (True, False, False, True):
                model.zero_grad(set_to_none)
                accumulate(model, text_loss, mine(cluster, text()), 1)
                assert_gradients_live_in_buckets(model)

    run_ranks(work, 2)


def test_the_place_of_a_gradient_that_is_missing_is_filled_with_zeros():
    used, unused = nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(4))
    bucket = Bucket([used, unused], num_flags=2)
    assert not bucket.flat.any() and bucket.missing == {used, unused}
    bucket.flat.fill_(7.0)  # numbers of the step before
    used.grad = torch.ones(2, 3)
    for each in (used, unused):
        bucket.move_in(each)
    assert bucket.flat.tolist() == [1.0] * 6 + [0.0] * 4 + [7.0] * 2
    assert used.grad is bucket.views[used] and unused.grad is None


def test_a_new_bucket_takes_over_the_gradients_that_are_there_already():
    first, second = nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(4))
    second.grad = torch.ones(4)
    bucket = Bucket([first, second])
    assert bucket.flat.tolist() == [0.0] * 6 + [1.0] * 4
    assert second.grad is bucket.views[second] and first.grad is None


class Copies(TorchDispatchMode):
    """This mode counts the calls of `copy_`."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten.copy_.default
        return func(*args, **(kwargs or {}))


def test_new_gradients_are_copied_into_the_bucket_once_and_views_are_not_copied():
    def work(cluster: Cluster) -> None:
        model = BucketDataParallel(nn.Linear(3, 2))
        for _ in range(2):
            model(torch.ones(1, 3)).sum().backward()
            model.finish_gradient_sync()
        for set_to_none, expected in ((True, 2), (False, 0)):
            model.zero_grad(set_to_none)
            loss = model(torch.ones(1, 3)).sum()
            with model.no_sync(), Copies() as copies:
                loss.backward()
            assert copies.count == expected

    run_ranks(work, 1)


def test_gradients_of_microbatches_add_up_in_the_buckets():
    def work(cluster: Cluster) -> None:
        model = BucketDataParallel(nn.Linear(3, 2))
        for step in range(3):
            model.zero_grad()
            with model.no_sync():
                for count in (1, 2):
                    model(torch.ones(1, 3) * (cluster.rank + 1)).sum().backward()
                    assert_gradients_live_in_buckets(model)
                    own = torch.full((2, 3), count * (cluster.rank + 1.0))
                    assert torch.equal(model.module.weight.grad, own), step
            model(torch.ones(1, 3) * (cluster.rank + 1)).sum().backward()
            model.finish_gradient_sync()
            assert torch.equal(model.module.weight.grad, torch.full((2, 3), 4.5)), step  # of 3 and 6

    run_ranks(work, 2)


def test_all_ranks_use_rank_0s_order_after_the_first_step():
    def work(cluster: Cluster) -> list[dict]:
        model = BucketDataParallel(EitherWay(0, backwards=cluster.rank == 0), bucket_mb=1e-6)
        states = [model.get_extra_state()]
        for step in range(3):
            model.zero_grad()
            mean_square(model, torch.ones(1, 3).double()).backward()
            model.finish_gradient_sync()
            states.append(model.get_extra_state())
            assert model.order.was_sent == (step == 0)
        assert [view.data_ptr() for bucket in model.buckets for view in bucket.views.values()] == [
            model.trained[i].grad.data_ptr() for i in states[-1]["order"]
        ]
        return states

    first, *others = run_ranks(work, 3)
    assert first[0] == {"order": [2, 1, 0], "is_final": False}  # as registered, backwards
    assert first[1] == first[2] == first[3] == {"order": [0, 1, 2], "is_final": True}
    assert all(other == first for other in others)


class Mixed(nn.Module):
    """Layers whose dtypes alternate."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(3, 3).to(DTYPES[i % 2]) for i in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x.to(layer.weight.dtype)))
        return x


def test_parameters_of_two_dtypes_never_share_a_bucket():
    def work(cluster: Cluster) -> None:
        x = torch.randn(6, 3, generator=torch.Generator().manual_seed(3))
        expected = reference_gradients(Mixed(0), lambda m: mean_square(m, x))
        model = BucketDataParallel(Mixed(cluster.rank))
        for _ in range(3):
            model.zero_grad()
            mean_square(model, *mine(cluster, (x,))).backward()
            model.finish_gradient_sync()
            assert [bucket.flat.dtype for bucket in model.buckets] == list(DTYPES[::-1]) * 2
            assert_gradients_live_in_buckets(model)
            assert all(p.grad.dtype == p.dtype for p in model.trained)
            assert_same(gradients(model.module), expected, 1e-5)

    run_ranks(work, 3)


def test_compressed_gradients_are_close_and_take_half_the_bytes():
    def work(cluster: Cluster) -> None:
        entry, (x, y), sizes = Entry("all_reduce", "ring"), examples(3), [7, 33, 3]
        batch = x.float(), y
        expected = reference_gradients(MLP(sizes), lambda m: odd_loss(m, *batch))
        sent = {}
        for dtype, rtol in ((None, 1e-5), ("bf16", 2**-6), ("fp16", 2**-9)):
            model = BucketDataParallel(MLP(sizes, cluster.rank), bucket_mb=5e-4, wire_dtype=dtype)
            assert len(model.buckets) > 1
            before = LEDGER.rows().get(entry, Traffic()).bytes_sent
            accumulate(model, odd_loss, mine(cluster, batch), 1)
            sent[dtype] = LEDGER.rows()[entry].bytes_sent - before
            assert_same(gradients(model.module), expected, rtol, f"gradient in {dtype}")
        assert sent["bf16"] == sent["fp16"] == sent[None] / 2

    run_ranks(work, 3)


def test_a_mean_in_fp16_buckets_does_not_overflow_even_if_the_sum_would():
    def work(cluster: Cluster) -> None:
        for own in ((40000.0, 40000.0, 40000.0), (100000.0, 10000.0, 10000.0)):  # both have a mean of 40000
            model = BucketDataParallel(nn.Linear(1, 1, bias=False), wire_dtype="fp16")
            model(torch.full((1, 1), own[cluster.rank])).sum().backward()
            model.finish_gradient_sync()
            assert_same(gradients(model.module), {"weight": torch.full((1, 1), 40000.0)}, 2**-10)

    run_ranks(work, 3)


def test_a_resumed_run_equals_an_uninterrupted_run():
    x = torch.randn(6, 50, generator=torch.Generator().manual_seed(3)).double()

    def work(cluster: Cluster) -> None:
        def begin(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
            model = BucketDataParallel(EitherWay(seed, backwards=True, width=50))
            return model, torch.optim.AdamW(model.parameters(), lr=1.0)

        def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
            for _ in range(3):
                optimizer.zero_grad()
                accumulate(model, lambda m, x, _: mean_square(m, x), mine(cluster, (x, x)), 1)
                optimizer.step()

        model, optimizer = begin(cluster.rank)
        train(model, optimizer)
        file = io.BytesIO()
        torch.save((model.state_dict(), optimizer.state_dict()), file)
        train(model, optimizer)

        file.seek(0)
        states = torch.load(file)
        resumed, its_optimizer = begin(seed=7)
        resumed.load_state_dict(states[0])
        its_optimizer.load_state_dict(states[1])
        train(resumed, its_optimizer)
        assert module_digest(resumed) == module_digest(model)

    run_ranks(work, 3)
