"""Compare every collective, in every pattern, with one process that knows all ranks' inputs.

The inputs are small whole numbers: then every reduction is exact in every dtype and in any order, and
the comparison is exact too.
"""

import hashlib
import itertools
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from comm import collectives
from comm.collectives import PATTERNS, CommError
from lab.ranks import run_ranks
from tests.comm.segments import short_segments

WORLD_SIZES = (1, 2, 3, 4, 5, 7)
REDUCTIONS = ("sum", "mean", "max", "min", "product")
DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.complex64,
)
LAYOUTS = ("contiguous", "strided", "transposed", "parameter")
ROOTED = ("broadcast", "scatter", "gather", "reduce")
REDUCING = ("reduce", "reduce_scatter", "all_reduce")
OURS = [(op, pattern) for op, patterns in PATTERNS.items() for pattern in patterns if op != "barrier"]
ALL = OURS + [(op, "torch") for op in PATTERNS if op != "barrier"]
ALL_REDUCE = (*PATTERNS["all_reduce"], "torch")
GARBAGE = 1  # in outputs before, and in the memory between the elements of a strided view


@dataclass(frozen=True)
class Case:
    op: str
    pattern: str
    numel: int = 12
    dtype: torch.dtype = torch.float32
    reduction: str = "sum"
    root: int = 0
    layout: str = "contiguous"
    seed: int = 0


def has_a_meaning(case: Case) -> bool:
    """Return False for what no program should ask for, and for what torch's own cannot do."""
    if case.pattern == "torch" and case.dtype.is_complex:
        return False
    if case.op not in REDUCING:
        return True
    if case.reduction == "mean":
        return case.dtype.is_floating_point or case.dtype.is_complex
    if case.reduction in ("max", "min"):
        return not case.dtype.is_complex
    return not (case.pattern == "torch" and case.dtype == torch.bool)


def sized_for(case: Case, n: int) -> int:
    """torch's own needs shards of one size."""
    return case.numel // n * n if case.pattern == "torch" else case.numel


def values(case: Case, rank: int, numel: int) -> torch.Tensor:
    """Return what `rank` brings; another thing on each rank."""
    source = torch.Generator().manual_seed(1000 * case.seed + rank)

    def draw() -> torch.Tensor:
        if case.reduction == "product":
            choice = torch.tensor([1, 2, 1, 2] if case.dtype == torch.uint8 else [1, 2, -1, -2])
            return choice[torch.randint(4, (numel,), generator=source)]
        low = 0 if case.dtype in (torch.uint8, torch.bool) else -3
        return torch.randint(low, 2 if case.dtype == torch.bool else 4, (numel,), generator=source)

    if case.dtype.is_complex:
        return torch.complex(draw().float(), draw().float()).to(case.dtype)
    return draw().to(case.dtype)


def reduced(inputs: list[torch.Tensor], reduction: str) -> torch.Tensor:
    """Return the single-process reference, in the widest dtype of its kind."""
    dtype, stack = inputs[0].dtype, torch.stack(inputs)
    if dtype == torch.bool:
        return stack.any(0) if reduction in ("sum", "max") else stack.all(0)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    stack = stack.to(wide)
    result = {
        "sum": lambda: stack.sum(0),
        "mean": lambda: stack.sum(0) / len(inputs),
        "max": lambda: stack.amax(0),
        "min": lambda: stack.amin(0),
        "product": lambda: stack.prod(0),
    }[reduction]()
    return result.to(dtype)


class Laid:
    """Values in a tensor of some memory layout, with the memory around them that must stay as it is."""

    def __init__(self, flat: torch.Tensor, layout: str) -> None:
        self.before, n = flat.clone(), flat.numel()
        self.around = torch.empty(0, dtype=flat.dtype)
        if layout == "strided":
            memory = torch.full((2 * n + 2,), GARBAGE, dtype=flat.dtype)
            self.tensor, self.around = memory[1:-1:2], memory[::2]
            self.tensor.copy_(flat)
        elif layout == "transposed":
            rows = next(d for d in (4, 3, 2, 1) if n % d == 0)
            self.tensor = flat.view(rows, n // rows).t().contiguous().t()
        elif layout == "parameter" and (flat.is_floating_point() or flat.is_complex()):
            self.tensor = torch.nn.Parameter(flat.clone())
        else:
            self.tensor = flat.clone()
        self.requires_grad = self.tensor.requires_grad

    def holds(self, expected: torch.Tensor, exact: bool = True, rounding: float = 1e-8) -> bool:
        got = self.tensor.detach().reshape(-1)
        same = torch.equal(got, expected) if exact else torch.allclose(got, expected, atol=rounding)
        return (
            same
            and bool((self.around == GARBAGE).all())
            and self.tensor.is_leaf
            and self.tensor.requires_grad == self.requires_grad
        )

    def is_unchanged(self) -> bool:
        return self.holds(self.before)


def run_case(case: Case, group: dist.ProcessGroup | None = None, async_op: bool = False) -> None:
    """Run one collective on this rank and compare all its tensors with the reference."""
    n, r = dist.get_world_size(group), dist.get_rank(group)
    numel = sized_for(case, n)
    inputs = [values(case, p, numel) for p in range(n)]
    parts = [torch.tensor_split(x, n) for x in inputs]
    options = {"group": group, "pattern": case.pattern, "async_op": async_op}
    collective = getattr(collectives, case.op)
    is_root = r == case.root

    def given(flat: torch.Tensor) -> Laid:
        return Laid(flat, case.layout)

    def blank(like: torch.Tensor) -> Laid:
        return Laid(torch.full_like(like, GARBAGE), case.layout)

    read: list[Laid] = []
    expected: torch.Tensor | None
    match case.op:
        case "broadcast":
            out, expected = given(inputs[r]), inputs[case.root]
            handle = collective(out.tensor, case.root, **options)
        case "scatter":
            out, expected = blank(parts[case.root][r]), parts[case.root][r]
            read = [given(inputs[r])] if is_root else []
            handle = collective(out.tensor, *[x.tensor for x in read], root=case.root, **options)
        case "gather":
            read = [given(parts[r][r])]
            out = blank(inputs[r])
            expected = torch.cat([parts[p][p] for p in range(n)]) if is_root else None
            full = out.tensor if is_root else None
            handle = collective(read[0].tensor, full, root=case.root, **options)
        case "reduce":
            out = given(inputs[r])
            expected = reduced(inputs, case.reduction) if is_root else None
            handle = collective(out.tensor, case.reduction, case.root, **options)
        case "all_gather":
            out, expected = blank(inputs[r]), torch.cat([parts[p][p] for p in range(n)])
            read = [given(parts[r][r])]
            handle = collective(out.tensor, read[0].tensor, **options)
        case "reduce_scatter":
            out = blank(parts[r][r])
            expected = reduced([parts[p][r] for p in range(n)], case.reduction)
            read = [given(inputs[r])]
            handle = collective(out.tensor, read[0].tensor, case.reduction, **options)
        case "all_reduce":
            out, expected = given(inputs[r]), reduced(inputs, case.reduction)
            handle = collective(out.tensor, case.reduction, **options)
        case "all_to_all":
            sizes = torch.randint(
                0, case.numel + 1, (n, n), generator=torch.Generator().manual_seed(case.seed)
            )
            sent = [values(case, p, int(sizes[p].sum())).split(sizes[p].tolist()) for p in range(n)]
            expected = torch.cat([sent[p][r] for p in range(n)])
            out, read = blank(expected), [given(torch.cat(sent[r]))]
            handle = collective(
                out.tensor, read[0].tensor, sizes[:, r].tolist(), sizes[r].tolist(), **options
            )
        case _:
            raise NotImplementedError(case.op)
    handle.wait()
    if expected is None:
        assert out.is_unchanged(), f"{case}: rank {r} of {n} is not the root, and its tensor has changed"
    else:
        exact = case.reduction != "mean"
        # Of float16 torch's own divides each rank's by n before it adds: n values below 3 are rounded.
        divides_first = not exact and case.pattern == "torch" and case.dtype == torch.float16
        rounding = 3 * torch.finfo(torch.float16).eps if divides_first else 1e-8
        holds = out.holds(expected, exact, rounding)
        assert holds, f"{case}: rank {r} of {n} got {out.tensor}, not {expected}"
    for operand in read:
        assert operand.is_unchanged(), f"{case}: rank {r} of {n} only lent {operand.before}"


def run_cases(cluster, cases: list[Case]) -> int:
    """Run, on each rank, all cases that have a meaning; return how many those were."""
    chosen = [case for case in cases if has_a_meaning(case)]
    for case in chosen:
        run_case(case)
    return len(chosen)


@pytest.mark.parametrize("n", WORLD_SIZES)
def test_every_pattern_equals_the_reference_at_every_size(n: int):
    dtypes, layouts, reductions = map(itertools.cycle, (DTYPES, LAYOUTS, REDUCTIONS[:1] + REDUCTIONS[2:4]))
    cases = [
        Case(op, pattern, numel, next(dtypes), next(reductions), seed % n, next(layouts), seed)
        for seed, (op, pattern) in enumerate(ALL)
        for numel in (0, 1, n - 1, n + 1, 4 * n, 101)
    ]
    with short_segments(32):  # 101 elements are several segments to each rank
        assert min(run_ranks(run_cases, n, cases)) > 0.8 * len(cases)


@pytest.mark.parametrize("n", WORLD_SIZES[1:])
def test_every_rank_can_be_the_root(n: int):
    cases = [
        Case(op, pattern, numel=2 * n + (pattern != "torch"), root=root, seed=root)
        for op, pattern in ALL
        if op in ROOTED
        for root in range(n)
    ]
    assert run_ranks(run_cases, n, cases) == [len(cases)] * n


@pytest.mark.parametrize("pattern", sorted({pattern for _, pattern in ALL}))
def test_every_reduction_is_right_in_every_dtype(pattern: str):
    cases = [
        Case(op, pattern, 7, dtype, reduction, root=1, seed=3)
        for op in REDUCING
        if (op, pattern) in ALL
        for dtype in DTYPES
        for reduction in REDUCTIONS
    ]
    run_ranks(run_cases, 3, cases)


def test_a_mean_of_float16_that_fits_does_not_overflow_though_the_sum_would():
    def mean(cluster) -> None:
        large = torch.full((5,), 40000.0, dtype=torch.float16)
        for op, pattern in ALL:
            if op not in REDUCING:
                continue
            mine = large[: 4 + (pattern != "torch")]
            given, shard = mine.clone(), torch.tensor_split(mine, cluster.world_size)[cluster.rank].clone()
            if op == "reduce_scatter":
                collectives.reduce_scatter(shard, given, "mean", pattern=pattern)
            else:
                getattr(collectives, op)(given, "mean", pattern=pattern)
            for got in (given, shard):
                assert torch.equal(got, mine[: len(got)]), f"{op}, {pattern}: {got}"

    for n in (2, 4):
        run_ranks(mean, n)


def test_a_mean_of_float16_is_rounded_once_on_any_number_of_ranks():
    def mean(cluster) -> None:
        numbers = torch.randint(-9, 9, (3, 50), generator=torch.Generator().manual_seed(0)).half()
        for pattern in PATTERNS["all_reduce"]:
            mine = numbers[cluster.rank].clone()
            collectives.all_reduce(mine, "mean", pattern=pattern)
            assert torch.equal(mine, numbers.double().mean(0).half()), pattern

    run_ranks(mean, 3)


def test_data_of_any_dtype_arrives_bit_by_bit():
    def carry(cluster) -> None:
        for dtype in (*DTYPES, torch.int16, torch.int8, torch.uint16, torch.complex128, torch.float8_e4m3fn):
            size = torch.empty(0, dtype=dtype).element_size()
            source = torch.Generator().manual_seed(7)
            numbers = torch.randint(0, 2 if dtype == torch.bool else 256, (9 * size,), generator=source)
            expected = numbers.to(torch.uint8)
            sent = expected.clone() if cluster.is_main else torch.zeros_like(expected)
            collectives.broadcast(sent.view(dtype))
            assert torch.equal(sent, expected), f"broadcast of {dtype}"
            whole = torch.zeros_like(expected)
            mine = expected.view(3, -1)[cluster.rank].clone()
            collectives.all_gather(whole.view(dtype), mine.view(dtype))
            assert torch.equal(whole, expected), f"all_gather of {dtype}"

    run_ranks(carry, 3)


cases_of_any_kind = st.builds(
    lambda op_and_pattern, **others: Case(*op_and_pattern, **others),
    st.sampled_from(ALL),
    numel=st.integers(0, 90),
    dtype=st.sampled_from(DTYPES),
    reduction=st.sampled_from(REDUCTIONS),
    root=st.integers(0, 6),
    layout=st.sampled_from(LAYOUTS),
    seed=st.integers(0, 99),
)


# Not shrunk: the error names the case.
@settings(max_examples=10, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(
    n=st.sampled_from(WORLD_SIZES),
    segment_bytes=st.integers(16, 200),
    cases=st.lists(cases_of_any_kind, min_size=10, max_size=30),
)
def test_any_sequence_of_collectives_equals_the_reference(n: int, segment_bytes: int, cases: list[Case]):
    cases = [Case(**{**vars(case), "root": case.root % n}) for case in cases]
    with short_segments(segment_bytes):
        run_ranks(run_cases, n, cases)


def test_tensors_of_several_real_segments_are_right():
    cases = [
        Case(op, pattern, 1_600_001) for op, pattern in OURS if pattern in ("pipelined_ring", "tcp", "cma")
    ]
    cases.append(Case("broadcast", "tree", 1_600_001, root=2))
    run_ranks(run_cases, 3, cases)


def test_tensors_of_more_segments_than_there_are_numbers_for_them_are_right():
    cases = [Case(op, pattern, 2001, layout="contiguous") for op, pattern in OURS if op != "all_to_all"]
    with short_segments(16):
        for n in (2, 3):
            run_ranks(run_cases, n, cases)


def test_tensors_of_any_shape_keep_it():
    def shapes(cluster) -> list[tuple]:
        scalar = torch.tensor(1.0)
        cube = torch.ones(2, 3, 4)[:, :, ::2]
        channels_last = torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last)
        for tensor in (scalar, cube, channels_last):
            collectives.all_reduce(tensor)
            assert bool((tensor == cluster.world_size).all())
        assert channels_last.is_contiguous(memory_format=torch.channels_last)
        return [tuple(tensor.shape) for tensor in (scalar, cube)]

    assert run_ranks(shapes, 3) == [[(), (2, 3, 2)]] * 3


def test_a_ring_all_reduce_adds_up_all_ranks_in_every_chunk():
    def add_up(cluster) -> list[float]:
        mine = torch.arange(8.0) + 10.0 ** (2 + cluster.rank)  # each element tells whom it has met
        collectives.all_reduce(mine, pattern="pipelined_ring")
        return mine.tolist()

    for n in (2, 4):
        everyone = sum(10.0 ** (2 + rank) for rank in range(n))
        assert run_ranks(add_up, n) == [[n * i + everyone for i in range(8)]] * n


def test_a_mean_is_divided_by_the_number_of_ranks_once():
    def average(cluster) -> list[float]:
        results = []
        for pattern in PATTERNS["all_reduce"]:
            mine = torch.full((6,), float(cluster.rank))
            collectives.all_reduce(mine, "mean", pattern=pattern)
            results.append(mine)
        shard = torch.empty(2)
        collectives.reduce_scatter(shard, torch.full((6,), float(cluster.rank)), "mean")
        return torch.cat([*results, shard]).tolist()

    for got in run_ranks(average, 3):
        assert got == [1.0] * (6 * len(PATTERNS["all_reduce"]) + 2)


def test_a_reduce_scatter_gives_each_rank_its_own_shard():
    def own(cluster) -> list[float]:
        shard = torch.empty(3)
        collectives.reduce_scatter(shard, torch.arange(12.0))
        return shard.tolist()

    assert run_ranks(own, 4) == [[4.0 * (3 * rank + i) for i in range(3)] for rank in range(4)]


def test_an_all_gather_puts_shards_in_rank_order_on_every_rank():
    def collect(cluster) -> list[float]:
        whole = torch.empty(8)
        collectives.all_gather(whole, torch.tensor([1.0, 2.0]) + 10 * cluster.rank)
        return whole.tolist()

    assert run_ranks(collect, 4) == [[1.0, 2.0, 11.0, 12.0, 21.0, 22.0, 31.0, 32.0]] * 4


def test_a_tree_broadcasts_from_every_root():
    def spread(cluster) -> list[float]:
        got = []
        for root in range(cluster.world_size):
            mine = torch.tensor([float(cluster.rank)])
            collectives.broadcast(mine, root, pattern="tree")
            got.append(mine.item())
        return got

    assert run_ranks(spread, 5) == [[0.0, 1.0, 2.0, 3.0, 4.0]] * 5


def test_a_reduce_leaves_alone_what_the_other_ranks_brought():
    def lend(cluster) -> list[float]:
        got = []
        for pattern in ("tree", "flat", "torch"):
            for root in range(cluster.world_size):
                mine = torch.tensor([10.0**cluster.rank])
                collectives.reduce(mine, root=root, pattern=pattern)
                got.append(mine.item())
        return got

    for rank, got in enumerate(run_ranks(lend, 4)):
        assert got == [1111.0 if root == rank else 10.0**rank for root in range(4)] * 3


def bits(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


@pytest.mark.parametrize("n", [2, 3, 4, 5, 7])
def test_an_all_reduce_of_random_floats_is_bitwise_the_same_on_every_rank(n: int):
    def reduce_all(cluster) -> list[str]:
        results = []
        for pattern, dtype, op in itertools.product(
            ALL_REDUCE, (torch.float32, torch.bfloat16, torch.float64), ("sum", "mean", "product")
        ):
            inputs = [
                torch.randn(1003, generator=torch.Generator().manual_seed(p)).to(dtype) for p in range(n)
            ]
            mine = inputs[cluster.rank].clone()
            collectives.all_reduce(mine, op, pattern=pattern)
            if op != "product":
                scale = n if op == "mean" else 1
                expected = torch.stack(inputs).double().sum(0) / scale
                tolerance = n * torch.finfo(dtype).eps * 10
                assert torch.allclose(mine.double(), expected, rtol=0, atol=tolerance), (pattern, dtype, op)
            results.append(f"{pattern} {dtype} {op} {bits(mine)}")
        return results

    first, *others = run_ranks(reduce_all, n)
    for other in others:
        assert other == first


def test_zeros_of_both_signs_and_nans_end_the_same_on_every_rank():
    def reduce_all(cluster) -> list[str]:
        signs, results = [0.0, -0.0, torch.nan, 1.0, -0.0], []
        for pattern, op in itertools.product(ALL_REDUCE, REDUCTIONS):
            mine = torch.tensor([signs[(cluster.rank + i) % len(signs)] for i in range(20)])
            collectives.all_reduce(mine, op, pattern=pattern)
            assert pattern == "torch" or mine.isnan().any(), (pattern, op)
            mine[mine.isnan()] = 2.0
            results.append(f"{pattern} {op} {bits(mine)}")
        return results

    for n in (2, 4, 5):
        first, *others = run_ranks(reduce_all, n)
        for other in others:
            assert other == first


def test_a_conjugated_view_is_reduced_by_its_values():
    def conjugate(cluster) -> None:
        z = torch.tensor([1 + 2j, 3 - 1j])
        for pattern in PATTERNS["all_reduce"]:
            mine = z.clone().conj()
            collectives.all_reduce(mine, pattern=pattern)
            assert torch.equal(mine.resolve_conj(), 3 * z.conj().resolve_conj()), pattern
        imaginary = z.clone().conj().imag
        collectives.all_reduce(imaginary)
        assert imaginary.tolist() == [-6.0, 3.0]

    run_ranks(conjugate, 3)


def test_an_all_gather_in_place_takes_its_part_of_the_whole():
    def in_place(cluster) -> None:
        for pattern, numel in (("pipelined_ring", 10), ("pipelined_ring", 2), ("torch", 12)):
            whole = torch.zeros(numel)
            mine = torch.tensor_split(whole, cluster.world_size)[cluster.rank]
            mine.fill_(cluster.rank + 1)
            collectives.all_gather(whole, mine, pattern=pattern)
            expected = [
                p + 1.0
                for p, part in enumerate(torch.tensor_split(whole, cluster.world_size))
                for _ in range(part.numel())
            ]
            assert whole.tolist() == expected

    run_ranks(in_place, 4)


def test_an_all_to_all_without_sizes_divides_evenly():
    def transpose(cluster) -> list[float]:
        n = cluster.world_size
        full = torch.arange(2.0 * n) + 100 * cluster.rank
        output = torch.empty(2 * n)
        collectives.all_to_all(output, full)
        return output.tolist()

    for rank, got in enumerate(run_ranks(transpose, 3)):
        assert got == [100 * p + 2 * rank + i for p in range(3) for i in range(2)]


def test_gradients_of_a_model_are_averaged_where_they_are():
    def average(cluster) -> None:
        layer = torch.nn.Linear(3, 2)
        torch.nn.init.constant_(layer.weight, 1.0)
        layer(torch.full((1, 3), float(cluster.rank))).sum().backward()
        for parameter in layer.parameters():
            collectives.all_reduce(parameter.grad, "mean")
            assert parameter.grad.grad_fn is None
        assert torch.equal(layer.weight.grad, torch.full((2, 3), 1.0))
        # and the parameter itself, as a missing no_grad would have it
        collectives.broadcast(layer.weight)
        assert layer.weight.is_leaf and layer.weight.requires_grad

    run_ranks(average, 3)


@pytest.mark.parametrize("pattern", ["tree", "torch"])
def test_nobody_leaves_a_barrier_before_all_have_come(pattern: str):
    def meet(cluster) -> None:
        for late in range(cluster.world_size):
            if cluster.rank == late:
                # a rank that slipped through would be here long before
                cluster.store.wait([f"{p} is at {late}" for p in range(cluster.world_size) if p != late])
                assert cluster.store.add(f"through {late}", 0) == 0
            else:
                cluster.store.set(f"{cluster.rank} is at {late}", "")
            cluster.store.add(f"came {late}", 1)
            collectives.barrier(pattern=pattern)
            assert cluster.store.add(f"came {late}", 0) == cluster.world_size
            cluster.store.add(f"through {late}", 1)

    for n in (1, 2, 3, 5):
        run_ranks(meet, n)


def test_a_barrier_waits_for_the_last_even_when_it_takes_a_while():
    def hold_back(cluster) -> list[bool]:
        if cluster.rank == 2:
            cluster.store.wait(["all have looked"])
        handle = collectives.barrier(async_op=True)
        passed = handle.is_completed() if cluster.rank != 2 else False
        if cluster.rank != 2 and cluster.store.add("looked", 1) == 2:
            cluster.store.set("all have looked", "")
        handle.wait()
        return [passed, handle.is_completed()]

    assert run_ranks(hold_back, 3) == [[False, True]] * 3


def test_a_group_of_some_ranks_counts_its_own_ranks():
    cases = [
        Case(op, pattern, 6 + 5 * (pattern != "torch"), root=root, seed=root)
        for op, pattern in ALL
        for root in ((0, 1) if op in ROOTED else (0,))
    ]

    def in_groups(cluster) -> list[int]:
        pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        for case in cases:
            run_case(case, pairs[cluster.rank % 2])
        # rank 1 is in all of these, as rank 1, 0 and 1
        overlapping = [dist.new_group(ranks) for ranks in ([0, 1], [1, 2], [0, 1, 2])]
        results = []
        for group, members in zip(overlapping, ([0, 1], [1, 2], [0, 1, 2]), strict=True):
            if cluster.rank in members:
                mine = torch.tensor([10**cluster.rank])
                collectives.all_reduce(mine, group=group)
                from_last = torch.tensor([cluster.rank])
                collectives.broadcast(from_last, root=len(members) - 1, group=group)
                results += [int(mine), int(from_last)]
        return results

    assert run_ranks(in_groups, 4) == [[11, 1, 111, 2], [11, 1, 110, 2, 111, 2], [110, 2, 111, 2], []]


def test_without_a_group_the_error_says_what_to_call():
    for call in (lambda: collectives.all_reduce(torch.ones(1)), collectives.barrier):
        with pytest.raises(CommError, match=r"no process group yet: call comm\.rendezvous\.join\(\) first"):
            call()
