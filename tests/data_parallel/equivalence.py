"""Compare data parallel wrappers with one process, on models with tied, frozen and unused parameters.

A wrapper is a function of a module. All wrappers, DDP too, have `finish_gradient_sync()`.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from comm.collectives import Group, barrier, use_pattern
from comm.cost import Link
from comm.wire import slow_link
from comm.wire.groups import own_group
from data_parallel.train_bucket_overlap import BucketDataParallel
from data_parallel.train_ddp import HookState, through_comm
from data_parallel.train_naive import NaiveDataParallel
from data_parallel.train_overlap import OverlapDataParallel
from lab.check import assert_same, gradients, parameters
from lab.cluster import Cluster
from lab.models.model import GPT, GPTConfig, loss_of
from lab.models.text import rank_slice
from lab.trace import timeline
from lab.trace.gantt import Event
from lab.trace.metronome import Metronome
from training.report import replica_digests

BATCH = 72  # 1 to 4 ranks divide it, and 1 to 3 microbatches divide a rank's slice
X = torch.randn(12, 3, generator=torch.Generator().manual_seed(0)).double()

Wrap = Callable[..., nn.Module]  # takes (module, group=None), returns the wrapper
Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


class Ddp(DistributedDataParallel):
    """torch's DDP with one bucket for each parameter, reduced through comm as in the lesson.

    DDP warns if it looks for unused parameters and finds none, so a module that has some says so.
    """

    def __init__(self, module: nn.Module, group: Group = None) -> None:
        super().__init__(
            module,
            process_group=group,
            bucket_cap_mb=1e-6,
            find_unused_parameters=getattr(module, "leaves_unused", False),
            gradient_as_bucket_view=True,
        )
        self.hook = HookState(group)
        self.register_comm_hook(self.hook, through_comm)

    def finish_gradient_sync(self) -> None:
        """Check for errors only: DDP waits at the end of the backward."""
        self.hook.check()


def by(pattern: str | None, wrapper: Wrap, **options: Any) -> Wrap:
    """Return a function that wraps a module, and lets its group use the pattern from then on."""

    def wrap(module: nn.Module, group: Group = None) -> nn.Module:
        use_pattern(pattern, group)
        return wrapper(module, group, **options)

    return wrap


OURS: dict[str, Wrap] = {
    "naive": by("ring", NaiveDataParallel),
    "overlap": by("ring", OverlapDataParallel),
    "a bucket for each": by(None, BucketDataParallel, bucket_mb=1e-6),
    "buckets": by("ring", BucketDataParallel, bucket_mb=1e-3),
    "one bucket": by("torch", BucketDataParallel, bucket_mb=4.0),
}
WRAPPERS: dict[str, Wrap] = OURS | {"ddp": Ddp}


class Odd(nn.Module):
    """A model with odd shapes and strides, a tied weight, frozen and unused layers, and rare branches."""

    leaves_unused = True

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.frozen, self.last = nn.Linear(7, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.early, self.late, self.never = nn.Linear(5, 3), nn.Linear(5, 3), nn.Linear(3, 3)
        self.register_buffer("scale", torch.full((1,), 1.0 + seed))
        self.late.weight = self.early.weight
        self.frozen.requires_grad_(False)
        self.last.weight = nn.Parameter(self.last.weight.detach().t().contiguous().t())  # permuted strides
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.frozen(self.first(x * self.scale)))
        y = self.last(h)
        for i, branch in enumerate((self.early, self.late)):
            takes_branch = x[:, i : i + 1] > 0
            y = y + branch(h) * takes_branch if takes_branch.any() else y
        return y


def examples(world_size: int) -> tuple[Tensor, Tensor]:
    """Return examples for Odd; the first and last of the last rank's slice take different branches."""
    random = torch.Generator().manual_seed(1)
    x, y = torch.randn(BATCH, 7, generator=random).double(), torch.randint(3, (BATCH,), generator=random)
    x[:, :2] = -1.0
    x[-BATCH // world_size, 0] = x[-1, 1] = 1.0
    return x, y


def odd_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


class EitherWay(nn.Module):
    """Two layers of equal shape, side by side; `backwards` decides only which gradient is ready first."""

    def __init__(self, seed: int, backwards: bool, width: int = 3) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(3)).double()
        self.backwards = backwards

    def forward(self, x: Tensor) -> Tensor:
        outputs = torch.zeros_like(x)
        for i, layer in list(enumerate(self.layers))[:: -1 if self.backwards else 1]:
            outputs = outputs + (i + 1) * torch.tanh(layer(x))
        return outputs


def layers(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def mean_square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def gpt(seed: int, tied: bool = True) -> GPT:
    config = GPTConfig(
        vocab_size=61, block_size=8, num_layers=1, num_heads=2, num_kv_heads=1, width=14, tied=tied
    )
    return GPT(config, seed=seed).double()


def text() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(61, (BATCH, 9), generator=torch.Generator().manual_seed(2))
    return tokens[:, :-1], tokens[:, 1:]


def text_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return loss_of(model(x), y)


def mine(cluster: Cluster, batch: tuple[Tensor, ...]) -> list[Tensor]:
    return [rank_slice(part, cluster.rank, cluster.world_size) for part in batch]


def accumulate(
    model: nn.Module, loss: Loss, batch: Sequence[Tensor], microbatches: int, syncing: Any = None
) -> None:
    """Compute the gradients of a step, as the lessons do; `syncing` is the model, or an optimizer of ZeRO."""
    syncing = syncing or model
    parts = list(zip(*(part.chunk(microbatches) for part in batch), strict=True))
    for i, (x, y) in enumerate(parts):
        syncing.require_backward_grad_sync = i == len(parts) - 1
        (loss(model, x, y) / microbatches).backward()
    syncing.finish_gradient_sync()


@contextlib.contextmanager
def no_sync(wrapper: Any) -> Iterator[None]:
    """Run all microbatches but the last in the block, as a lesson's loop does."""
    wrapper.require_backward_grad_sync = False
    try:
        yield
    finally:
        wrapper.require_backward_grad_sync = True


def mean_gradients(module: nn.Module) -> dict[str, Tensor]:
    """Return the gradient of each trained parameter. Unused parameters have zeros, which torch leaves out."""
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in trained.items()}


def one_process(module: nn.Module, loss: Callable[[nn.Module], Tensor]) -> dict[str, Tensor]:
    """Return the gradients that one process gets from the loss over the global batch."""
    module.zero_grad()
    loss(module).backward()
    return mean_gradients(module)


def assert_same_start(module: nn.Module, reference: nn.Module, what: str) -> None:
    """Compare parameters and buffers, of which a wrapper gives all ranks those of rank 0."""
    assert_same(parameters(module), parameters(reference), 0, f"initial parameter{what}")
    assert_same(dict(module.named_buffers()), dict(reference.named_buffers()), 0, f"initial buffer{what}")


def in_pairs(cluster: Cluster) -> tuple[dist.ProcessGroup, int, int]:
    """Form groups of ranks 0 and 2, and 1 and 3. Return the own group, its number, and the rank in it."""
    group = own_group([[0, 2], [1, 3]])
    return group, cluster.rank % 2, cluster.rank // 2


def compare_with_one_process(
    cluster: Cluster,
    wrap: Wrap,
    make: Callable[[int], nn.Module],
    loss: Loss,
    batch: tuple[Tensor, Tensor],
    microbatches: Sequence[int] = (1, 2, 3),
    what: str = "",
) -> None:
    """Compare every gradient in each step, and every parameter after the steps of SGD.

    Gradients are set to None before even steps, and to zero before odd ones. One may be None for zeros.
    """
    reference, model = make(0), wrap(make(cluster.rank))
    what = f", {what}" if what else ""
    assert_same_start(model.module, reference, what)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (reference, model)]
    for step, count in enumerate(microbatches):
        expected = one_process(reference, lambda m: loss(m, *batch))
        optimizers[1].zero_grad(set_to_none=step % 2 == 0)
        accumulate(model, loss, mine(cluster, batch), count)
        found = gradients(model.module)
        frozen = dict.fromkeys(found.keys() - expected.keys())
        got = {
            name: e if found[name] is None and not e.any() else found[name] for name, e in expected.items()
        }
        got |= {name: found[name] for name in frozen}
        assert_same(got, expected | frozen, what=f"gradient{what}, step {step},")
        for optimizer in optimizers:
            optimizer.step()
    assert_same(parameters(model.module), parameters(reference), what=f"parameter{what},")
    assert len(set(replica_digests(cluster, model))) == 1, what


def trace_of_a_step(name: str) -> list[Event]:
    """Return the events of the second step: each of 4 layers has 20 ms of backward and 12 ms on the wire."""
    layers = nn.ParameterList(torch.zeros(8) for _ in range(4))
    with slow_link.slowed(Link(0.004, 0.0)):
        model = WRAPPERS[name](Metronome(layers, [[layer] for layer in layers], 0.01, vocab_size=2))
        for _ in range(2):
            model.zero_grad()
            barrier()  # a late rank would post its messages after the other backward
            timeline.start_recording()
            with timeline.span("forward", "forward"):
                loss = model(torch.zeros(1, 1)).sum()
            with timeline.span("backward", "backward"):
                loss.backward()
            model.finish_gradient_sync()
            timeline.stop_recording()
    return timeline.recorded()
