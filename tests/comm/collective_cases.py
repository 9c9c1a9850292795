"""Describe a call of a collective, run it on every rank, and compare all its tensors with one process.

The inputs are small integers: then every reduction is exact in every dtype and in any order, and the
comparison is exact too.
"""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from comm import collectives
from comm.collectives import PATTERNS

WORLD_SIZES = (1, 2, 3, 4, 5)
REDUCTIONS = ("sum", "mean", "max", "min", "product")
DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64),
    *(torch.int64, torch.int32, torch.uint8, torch.bool),
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

    def __str__(self) -> str:
        how = f" ({self.reduction})" if self.op in REDUCING else ""
        root = f", root {self.root}" if self.op in ROOTED else ""
        return f"{self.op}{how} with {self.pattern}, {self.numel} elements of {self.dtype}{root}"


def varied(calls: Iterable[tuple[str, str]], n: int, numels: tuple[int, ...]) -> list[Case]:
    """Return a case for each call and size, in turn with each dtype, layout, reduction and root."""
    dtypes, layouts = itertools.cycle(DTYPES), itertools.cycle(LAYOUTS)
    reductions = itertools.cycle(("sum", "max", "min"))
    return [
        Case(op, pattern, numel, next(dtypes), next(reductions), seed % n, next(layouts), seed)
        for seed, (op, pattern) in enumerate(calls)
        for numel in numels
    ]


def has_a_meaning(case: Case) -> bool:
    """Return whether the case is valid: not meaningless, and possible for torch's own collectives."""
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
    """Return the number of elements to use: torch's own collectives need shards of one size."""
    return case.numel // n * n if case.pattern == "torch" else case.numel


def values(case: Case, rank: int, numel: int) -> torch.Tensor:
    """Return the tensor of `rank`, which differs from those of other ranks."""
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
    """A tensor of some memory layout, and the memory around it, which must not change."""

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


def first_difference(got: torch.Tensor, expected: torch.Tensor) -> str:
    """Return which element differs first, and the factor if it is one for all elements."""
    got = got.detach().reshape(-1)
    if got.shape != expected.shape:
        return f"there are {got.numel()} elements, expected {expected.numel()}"
    wrong = (got != expected).nonzero().flatten().tolist()
    if not wrong:
        return "the elements are right, but what lies between them in memory or requires_grad has changed"
    kind = torch.complex128 if got.is_complex() else torch.float64
    ratios = (got.to(kind) / expected.to(kind))[expected != 0]
    is_factor = len(ratios) > 0 and bool(got[expected == 0].eq(0).all())
    is_factor = is_factor and torch.allclose(ratios, ratios[:1], rtol=1e-2)
    factor = f"{ratios[0].item():.3g} times what it should be: " if is_factor else ""
    place = wrong[0]
    return f"{factor}element {place} of {len(got)} is {got[place].item()}, expected {expected[place].item()}"


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
            if case.pattern == "bruck":  # all parts have one size
                sizes.fill_(case.numel)
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
        assert holds, f"{case}, {n} ranks: {first_difference(out.tensor, expected)}"
    for laid in read:
        assert laid.is_unchanged(), f"{case}: rank {r} of {n} must not change {laid.before}"


def run_cases(cluster, cases: list[Case], group=None) -> int:
    """Run all valid cases on this rank; return how many there were."""
    chosen = [case for case in cases if has_a_meaning(case)]
    for case in chosen:
        run_case(case, group)
    return len(chosen)
