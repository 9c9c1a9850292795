"""Test what each compressor sends, and the wrapper that compresses: what it sends later, and its errors.

tests/test_wrappers.py compares the wrapper without compression, as all wrappers, with one process.
"""

import copy
import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torchs
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from comm.collectives import CommError
from comm.exchange import exchange
from data_parallel.train_bucket_overlap import BucketDataParallel
from lab.check import assert_same, gradients, state_digest
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.models.model import GPT, GPTConfig
from lab.ranks import run_ranks
from lab.trace.ledger import LEDGER
from low_communication.compressors import BLOCK, COMPRESSORS, Int8, PowerSGD, TopK
from low_communication.train_compressed import CompressedDataParallel
from tests.equivalence import accumulate, mine, one_process
from tests.low_communication.equivalence import payload
from tests.on_ranks import on_ranks
from tests.tasks import gpt, mean_square, text, text_loss
from training.checkpoint import Checkpoints
from training.report import replica_digests
from training.state_shards import plain_shards

SHAPES = [(40, 30), (7,), (), (90, 12, 3), (2, 3)]  # two are worth two thin matrices
NUMEL = 40 * 30 + 7 + 1 + 90 * 36 + 6
CLOSE = {torch.float64: 1e-6, torch.float32: 1e-5, torch.bfloat16: 2**-7}  # topk sends float32 of float64


def values(rank: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a bucket whose numbers become smaller from block to block, another one on each rank."""
    random = torch.Generator().manual_seed(rank)
    return (torch.randn(NUMEL, generator=random) * torch.logspace(0, -3, NUMEL) * 10.0**-rank).to(dtype)


@on_ranks(3)
def test_all_ranks_get_the_mean_of_what_ranks_have_sent_and_the_bytes_are_the_formulas(cluster: Cluster):
    for name, compress in COMPRESSORS.items():
        for dtype, near in CLOSE.items():
            what = f"{name}, {dtype}"
            compressor = compress(SHAPES, None, dtype)
            for step in range(2):
                flat = values(3 * step + cluster.rank, dtype)
                own = flat.to(torch.float64, copy=True)
                before = LEDGER.total()
                sent = compressor.mean(flat)
                assert LEDGER.total() - before == compressor.traffic(), what
                mean = sum(exchange(sent.double())) / cluster.world_size
                rounded = {"bf16": 2**-7, "int8": 1 / 127}.get(name, near)  # of the largest
                assert_same({"mean": flat.double()}, {"mean": mean}, rounded, what)
                if name in ("float32", "bf16", "int8"):
                    assert_same({"own": sent.double()}, {"own": own}, rounded, what)
                assert len(set(exchange(state_digest({"mean": flat})))) == 1, what
                assert flat.dtype == sent.dtype == dtype, what


@on_ranks(3)
def test_int8_rounds_by_at_most_half_a_scale_of_the_ranks_own_block(cluster: Cluster):
    compressor, own = Int8(SHAPES), values(cluster.rank)
    flat = own.clone()
    sent = compressor.mean(flat)
    mean = sum(exchange(sent)) / cluster.world_size
    for block in range(0, NUMEL, BLOCK):
        part = slice(block, block + BLOCK)
        for exact, rounded in ((own[part], sent[part]), (mean[part], flat[part])):
            scale, off = exact.abs().max() / 127, (rounded - exact).abs().max()
            what = f"of {BLOCK} numbers from {block}, one is rounded by {off / scale:.2f} of their scale"
            assert off <= 1.001 * scale / 2, f"{what}, and not at most 0.5"  # 1.001: of float32
    assert not compressor.mean(torch.zeros(NUMEL)).any(), "zeros do not stay zeros"


@on_ranks(2)
def test_topk_sends_the_largest_numbers_of_each_rank(cluster: Cluster):
    flat = torch.tensor([0.0, 3.0, -4.0, 1.0]).roll(cluster.rank)
    assert TopK([(4,)], share=0.5).mean(flat).tolist() == [[0, 3, -4, 0], [0, 0, 3, -4]][cluster.rank]
    assert flat.tolist() == [0, 1.5, -0.5, -2]


@on_ranks(3)
def test_powersgd_is_exact_if_the_mean_has_few_dimensions_and_for_zeros(cluster: Cluster):
    compressor = PowerSGD([(30, 20)], rank=4)
    random = torch.Generator().manual_seed(cluster.rank)
    matrix = torch.outer(torch.randn(30, generator=random), torch.randn(20, generator=random))
    for flat in (torch.zeros(600), matrix.flatten(), torch.zeros(600), matrix.flatten()):
        mean = sum(exchange(flat.clone())) / cluster.world_size
        compressor.mean(flat)
        assert_same({"mean": flat}, {"mean": mean}, 1e-5, "mean")


@on_ranks(1)
def test_a_share_or_a_number_of_columns_that_makes_no_sense_is_refused(cluster: Cluster):
    for share in (0.0, -1.0, 2.0, math.nan):
        with pytest.raises(WorkbookError, match="above 0, and at most 1"):
            TopK([(4, 3)], share=share)
    with pytest.raises(WorkbookError, match="a number from 1"):
        PowerSGD([(4, 3)], rank=0)


def layers(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    sizes = ((12, 20), (20, 16), (16, 9))
    return nn.Sequential(*(nn.Sequential(nn.Linear(*size), nn.Tanh()) for size in sizes)).double()


def compare_with_hook(
    cluster: Cluster, name: str, rtol: float, state: Any, hook: Any, **options: Any
) -> None:
    """Compare gradients of several steps; the parameters stay, so that only the compressors differ."""
    ddp, ours = DistributedDataParallel(layers(0)), CompressedDataParallel(layers(0), name, **options)
    [own_bucket] = ours.buckets

    def from_the_same_state(state: Any, bucket: dist.GradBucket) -> Future[Tensor]:
        if name == "powersgd" and state.iter == 2 and 0 not in state.q_memory_dict:
            [compressor], places = ours.compressors.values(), [id(p) for p in own_bucket.views]
            pairs = zip(ddp.module.parameters(), ours.module.parameters(), strict=True)
            place_of = {id(theirs): places.index(id(own)) for theirs, own in pairs}
            at = [place_of[id(p)] for p in bucket.parameters()]
            qs = [compressor.qs[i] for i in at if i in compressor.qs]
            rows = sum(compressor.shapes[i][0] for i in compressor.qs)
            state.q_memory_dict[0] = torch.cat([q.flatten() for q in qs]).double()
            state.p_memory_dict[0] = torch.empty(rows * compressor.columns).double()
        return hook(state, bucket)

    ddp.register_comm_hook(state, from_the_same_state)
    for step in range(5):
        random = torch.Generator().manual_seed(10 * step + cluster.rank)
        x = torch.randn(24, 12, generator=random).double()
        for model in [ddp] if step < 2 and name == "powersgd" else [ddp, ours]:  # it begins in the third
            model.zero_grad()
            model(x).square().mean().backward()
        if step >= 2 or name != "powersgd":
            ours.finish_gradient_sync()
            assert_same(gradients(ours.module), gradients(ddp.module), rtol, f"gradient in step {step}")


@on_ranks(3)
def test_powersgd_equals_pytorchs_hook_from_the_same_state(cluster: Cluster):
    for rank in (2, 4):
        state = torchs.PowerSGDState(
            None,
            matrix_approximation_rank=rank,
            start_powerSGD_iter=2,
            min_compression_rate=1,
            orthogonalization_epsilon=0,
            warm_start=True,
        )
        compare_with_hook(cluster, "powersgd", 1e-6, state, torchs.powerSGD_hook, rank=rank)


@on_ranks(2)
def test_bf16_equals_pytorchs_hook(cluster: Cluster):
    compare_with_hook(cluster, "bf16", 0, None, bf16_compress_hook, error_feedback=False)


def test_the_share_of_bytes_that_is_sent_of_a_gpt():
    def shares(cluster: Cluster) -> list[float]:
        found = []
        for name in ("bf16", "int8", "powersgd"):
            model = CompressedDataParallel(GPT(GPTConfig.named("8layers")), name)
            found.append(model.traffic().bytes_sent / BucketDataParallel.traffic(model).bytes_sent)
        return found

    bf16, int8, powersgd = run_ranks(shares, 2)[0]
    assert bf16 <= 0.501 and int8 <= 0.26 and powersgd <= 0.05


def wide(seed: int) -> nn.Module:
    """Return a model that every compressor compresses; its first weight has permuted strides."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(30, 20), nn.Tanh(), nn.Linear(20, 25), nn.Linear(25, 12))
    model[0].weight = nn.Parameter(torch.randn(30, 20).t())
    return model


@on_ranks(3)
def test_what_is_sent_and_what_remains_are_the_gradient_and_what_remained(cluster: Cluster):
    for name in COMPRESSORS:
        model, own = CompressedDataParallel(wide(cluster.rank), name, bucket_mb=2e-3), wide(0)
        sent_by: dict[nn.Parameter, Tensor] = defaultdict(float)  # type: ignore[arg-type]
        for bucket, compressor in model.compressors.items():

            def mean(flat: Tensor, bucket=bucket, mean=compressor.mean) -> Tensor:
                sent = mean(flat)
                for parameter, view in bucket.views.items():
                    at = view.storage_offset()
                    sent_by[parameter] += sent.as_strided(view.shape, view.stride(), at)
                return sent

            compressor.mean = mean  # type: ignore[method-assign]
        total = dict.fromkeys(dict(own.named_parameters()), torch.zeros(()))
        for step in range(3):
            x = torch.randn(8, 30, generator=torch.Generator().manual_seed(10 * step + cluster.rank))
            for key, gradient in one_process(own, lambda m: mean_square(m, x)).items():
                total[key] = total[key] + gradient
            model.zero_grad()
            accumulate(model, lambda m, x, _: mean_square(m, x), (x, x), microbatches=2)
            remaining = {
                parameter: left.as_strided(view.shape, view.stride(), view.storage_offset())
                for bucket, left in model.remaining.items()
                for parameter, view in bucket.views.items()
            }
            found = {key: sent_by[p] + remaining[p] for key, p in model.module.named_parameters()}
            assert_same(found, total, 1e-5, f"{name}: sum of gradients after step {step},")


def gradients_of_steps(
    cluster: Cluster, model: CompressedDataParallel, steps: Sequence[int], overflow: Sequence[int] = ()
) -> list[dict[str, Tensor]]:
    """Return the gradients of each step. Rank 1 has an infinite one in the steps in `overflow`."""
    found = []
    for step in steps:
        x = torch.randn(8, 30, generator=torch.Generator().manual_seed(10 * step + cluster.rank))
        model.zero_grad()
        factor = math.inf if step in overflow and cluster.rank == 1 else 1.0
        (mean_square(model, x) * factor).backward()
        model.finish_gradient_sync()
        found.append(gradients(model.module))
    return found


@on_ranks(2)
def test_a_step_that_overflows_on_one_rank_is_lost_and_no_other(cluster: Cluster):
    for name, feedback in itertools.product(COMPRESSORS, (True, False)):
        model, other = (
            CompressedDataParallel(wide(0), name, bucket_mb=2e-3, error_feedback=feedback) for _ in range(2)
        )
        found = gradients_of_steps(cluster, model, range(5), overflow=[2])
        assert not all(one.isfinite().all() for one in found.pop(2).values())
        for ours, expected in zip(found, gradients_of_steps(cluster, other, (0, 1, 3, 4)), strict=True):
            assert_same(ours, expected, 0, f"gradient with {name}")


@on_ranks(2)
def test_after_a_load_compression_begins_again(cluster: Cluster, tmp_path):
    def by_checkpoint(model: CompressedDataParallel) -> None:
        checkpoints, optimizer = Checkpoints(tmp_path, cluster), torch.optim.SGD(model.parameters())
        checkpoints.save(1, plain_shards(model.module, optimizer))
        checkpoints.load(1, plain_shards(model.module, optimizer))

    for load in (by_checkpoint, lambda model: model.module.load_state_dict(model.module.state_dict())):
        model, fresh = (CompressedDataParallel(wide(0), "powersgd") for _ in range(2))
        gradients_of_steps(cluster, model, (0, 1))
        load(model)
        [found], [expected] = (gradients_of_steps(cluster, each, [2]) for each in (model, fresh))
        assert_same(found, expected, 0)


@on_ranks(1)
def test_what_compression_would_spoil_is_refused_in_a_sentence(cluster: Cluster):
    for dtype, sentence in (
        (torch.complex64, "^Complex gradients"),
        (torch.float16, "too large for float16"),
    ):
        with pytest.raises(WorkbookError, match=sentence):
            CompressedDataParallel(nn.Linear(2, 2, dtype=dtype))


@on_ranks(3)
def test_replicas_stay_bitwise_equal(cluster: Cluster):
    for name in COMPRESSORS:
        for feedback in (True, False):
            wrapped = gpt(cluster.rank).to(torch.bfloat16 if feedback else torch.float32)
            model = CompressedDataParallel(wrapped, name, bucket_mb=1e-2, error_feedback=feedback)
            optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
            for _ in range(2):
                optimizer.zero_grad()
                text_loss(model, *mine(cluster, text())).backward()
                model.finish_gradient_sync()
                optimizer.step()
            assert len(set(replica_digests(cluster, model))) == 1, name
            assert bool(model.remaining) == feedback


@on_ranks(2)
def test_powersgd_takes_a_weight_with_permuted_strides_as_a_matrix(cluster: Cluster):
    layer = nn.Linear(30, 20, bias=False)
    layer.weight = nn.Parameter(torch.randn(30, 20).t())
    model = CompressedDataParallel(layer, "powersgd", rank=4)
    x = torch.randn(2, 30, generator=torch.Generator().manual_seed(0))  # so the mean has rank 2
    mean = one_process(copy.deepcopy(layer), lambda m: mean_square(m, x))
    mean_square(model, x[cluster.rank : cluster.rank + 1]).backward()
    model.finish_gradient_sync()
    assert_same(gradients(layer), mean, 1e-5)


@on_ranks(1)
def test_an_error_of_the_thread_is_raised_by_finish_and_nothing_more_is_sent(cluster: Cluster):
    model = CompressedDataParallel(gpt(0), bucket_mb=1e-3)
    calls = []

    def mean(flat: Tensor) -> Tensor:
        calls.append(flat)
        raise CommError("a peer has died")

    for compressor in model.compressors.values():
        compressor.mean = mean  # type: ignore[method-assign]
    text_loss(model, *text()).backward()
    with pytest.raises(CommError, match="a peer has died"):
        model.finish_gradient_sync()
    assert len(calls) == 1 < len(model.buckets)


def the_largest(numbers: Tensor) -> Tensor:
    """Return the third of the numbers that is largest in size, and zeros for the others."""
    return numbers * (numbers.abs() >= numbers.abs().sort(descending=True).values[len(numbers) // 3 - 1])


def compare(cluster: Cluster, microbatches: int) -> None:
    """Compare topk with its definition. There is one weight, so all gradients together are one tensor."""
    n, size = cluster.world_size, 12
    model = CompressedDataParallel(nn.Linear(size, 1, bias=False), "topk", share=1 / 3)
    remaining = [torch.zeros(size)] * n
    for step in range(4):
        x = torch.randn(n, microbatches, size, generator=torch.Generator().manual_seed(step))
        before = [x[rank].mean(0) + remaining[rank] for rank in range(n)]  # the gradient of x @ weight is x
        sent = [the_largest(each) for each in before]
        remaining = [all_of_it - part for all_of_it, part in zip(before, sent, strict=True)]
        model.zero_grad()
        own = x[cluster.rank]
        accumulate(model, lambda model, x, _: model(x).sum(), (own, own), microbatches)
        expected = {"weight": sum(sent)[None] / n}
        assert_same({"weight": model.module.weight.grad}, expected, 1e-5, f"gradient in step {step}")


def test_what_a_step_has_not_sent_is_sent_later():
    run_ranks(compare, 2, 1)


def test_microbatches_add_up_before_they_are_compressed():
    run_ranks(compare, 3, 2)


@on_ranks(2)
def test_a_step_sends_few_bytes_and_earlier_microbatches_none(cluster: Cluster):
    model, x = CompressedDataParallel(nn.Linear(256, 64, bias=False), "int8"), torch.ones(1, 256)
    start = payload()
    model.require_backward_grad_sync = False
    model(x).sum().backward()
    early = payload() - start
    assert early == 0, f"a backward before the last one sent {early} bytes, and not 0"
    model.require_backward_grad_sync = True
    model(x).sum().backward()
    model.finish_gradient_sync()
    share = (payload() - start) / (256 * 64 * 4)  # of what a ring sends on 2 ranks
    assert share < 0.26, f"a step with int8 sent {share:.2f} times the bytes of float32, and not 0.25"
