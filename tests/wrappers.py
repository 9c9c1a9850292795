"""Train any wrapper of a model, and compare each gradient with one process.

There are three kinds: wrappers of a module whose ranks have slices of one batch; optimizers of ZeRO, which
get its parameters; and wrappers that divide the model or its tokens, whose ranks have the full batch. All are
called by the names of tables, so that a learner's class may stand in a lesson's place.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.parallel import DistributedDataParallel

from comm.collectives import Group, all_reduce, broadcast, use_pattern
from comm.wire.groups import own_group
from context_parallel.parallel_model import ContextParallel
from data_parallel import train_ddp
from data_parallel.train_bucket_overlap import BucketDataParallel
from data_parallel.train_naive import NaiveDataParallel
from data_parallel.train_overlap import OverlapDataParallel
from lab.check import assert_same
from lab.cluster import Cluster
from lab.models.model import GPT, IGNORED, GPTConfig, loss_of
from lab.models.text import rank_slice
from low_communication.train_compressed import CompressedDataParallel
from low_communication.train_hsdp import HybridShardedDataParallel
from tensor_parallel.parallelize import parallelize
from tensor_parallel.train_dtensor import DTensorGPT
from tests.context_parallel.equivalence import VARIANTS, Variant
from zero.train_fsdp import shard
from zero.train_zero1 import ZeroOptimizer
from zero.train_zero1_textbook import TextbookZeroOptimizer
from zero.train_zero2 import ZeroGradientOptimizer
from zero.train_zero3 import FullyShardedDataParallel
from zero.train_zero3_textbook import TextbookFullyShardedDataParallel

BATCH = 72  # 1 to 4 ranks divide it, and 1 to 3 microbatches divide a rank's slice
X = torch.randn(12, 3, generator=torch.Generator().manual_seed(0)).double()
TINY = 1e-6  # MiB, so that each parameter has a bucket

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
            bucket_cap_mb=TINY,
            find_unused_parameters=getattr(module, "leaves_unused", False),
            gradient_as_bucket_view=True,
        )
        self.hook = train_ddp.HookState(group)
        self.register_comm_hook(self.hook, train_ddp.through_comm)

    def finish_gradient_sync(self) -> None:
        """Check for errors only: DDP waits at the end of the backward."""
        self.hook.check()


def one_bucket(module: nn.Module, group: Group = None) -> nn.Module:
    use_pattern("torch", group)
    return BucketDataParallel(module, group, bucket_mb=4.0)


def hybrid(module: nn.Module, group: Group = None, **options: Any) -> nn.Module:
    """Shard within two machines of equally many ranks or, if their number is odd, keep all as replicas."""
    n = dist.get_world_size()
    size = n // 2 if n % 2 == 0 else 1
    machines = [list(range(first, first + size)) for first in range(0, n, size)]
    shards = own_group(machines, "shards")
    replicas = own_group([list(ranks) for ranks in zip(*machines, strict=True)], "replicas")
    return HybridShardedDataParallel(module, shards, replicas, **options)


def fsdp(module: nn.Module, group: Group = None, **options: Any) -> nn.Module:
    model = shard(module, torch.device("cpu"), **options)
    model.finish_gradient_sync = lambda: None
    return model


def dtensor(module: GPT, group: Group = None, **options: Any) -> nn.Module:
    model = DTensorGPT(module, module.token_embedding.weight.device, **options)
    model.loss = loss_of
    return model


def cut(variant: Variant) -> Wrap:
    """`change` changes the model that is cut, before it is used."""

    def wrap(module: GPT, group: Group = None, change: Callable[[GPT], None] | None = None) -> nn.Module:
        model = ContextParallel(module, variant.attention, variant.cut, variant.kernel, group)
        if change is not None:
            change(module)
        return model

    return wrap


OURS: dict[str, Wrap] = {
    "naive": lambda module, group=None: NaiveDataParallel(module, group),
    "overlap": lambda module, group=None: OverlapDataParallel(module, group),
    "a bucket for each": lambda module, group=None: BucketDataParallel(module, group, bucket_mb=TINY),
    "buckets": lambda module, group=None: BucketDataParallel(module, group, bucket_mb=5e-4),
    "one bucket": one_bucket,
}
OVERLAPPING = ("overlap", "a bucket for each", "one bucket")
REPLICAS: dict[str, Wrap] = OURS | {
    "ddp": Ddp,
    "compressed": lambda module, group=None: CompressedDataParallel(module, "float32", group),
}
ZERO_STAGES = ("zero1", "zero2", "zero3")
OF_PARAMETERS: dict[str, Any] = {
    "zero1_textbook": TextbookZeroOptimizer,
    "zero1": ZeroOptimizer,
    "zero2": ZeroGradientOptimizer,
}
OF_MODULES: dict[str, Wrap] = REPLICAS | {
    "zero3_textbook": lambda module, group=None: TextbookFullyShardedDataParallel(module, group),
    "zero3": lambda module, group=None, **options: FullyShardedDataParallel(module, group, **options),
    "hsdp": hybrid,
    "fsdp": fsdp,
}
TENSORS: dict[str, Wrap] = {
    "tensor": lambda module, group=None, **options: parallelize(module, group, False, **options),
    "sequence": lambda module, group=None, **options: parallelize(module, group, True, **options),
}
CONTEXTS = dict(
    zip(("ring", "textbook ring", "contiguous ring", "all to all"), map(cut, VARIANTS), strict=True)
)
DTENSORS: dict[str, Wrap] = {
    "dtensor": dtensor,
    "sequence dtensor": lambda module, group=None: dtensor(module, sequence_parallel=True),
}
DIVIDED = TENSORS | CONTEXTS | DTENSORS
NAMES = [*REPLICAS, *OF_PARAMETERS, "zero3_textbook", "zero3", "hsdp"]
SHARDED = ("zero1_textbook", "zero3_textbook", *ZERO_STAGES, "hsdp")
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    # On GPUs either all parameters must be DTensors for the default of foreach, or none.
    "sgd": (torch.optim.SGD, {"lr": 1.0, "foreach": False}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    # The gradient of a key's bias is zero except for rounding, which AdamW would magnify with a smaller eps.
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "eps": 1e-3}),
}


class Trained:
    """A wrapper and its optimizer, with the same method names for all wrappers."""

    def __init__(
        self,
        name: str,
        module: nn.Module,
        optimizer: str = "sgd",
        group: Group = None,
        pattern: str | None = None,
        **options: Any,
    ) -> None:
        use_pattern(pattern, group)
        optimizer_class, defaults = OPTIMIZERS[optimizer]
        self.name, self.module = name, module
        if name not in OF_PARAMETERS:
            self.model = self.syncing = (OF_MODULES | DIVIDED)[name](module, group, **options)
            self.optimizer = optimizer_class(self.model.parameters(), **defaults)
        else:
            for buffer in module.buffers():  # an optimizer does not see them
                broadcast(buffer, group=group)
            zero, parameters = OF_PARAMETERS[name], module.parameters()
            self.model = module
            self.syncing = self.optimizer = zero(
                parameters, optimizer_class, group=group, **options, **defaults
            )

    def accumulate(self, loss: Loss, batch: Sequence[Tensor], microbatches: int = 1) -> Tensor:
        """Compute the gradients of a step from this rank's part of the batch, and return its loss."""
        parts, losses = list(zip(*(part.chunk(microbatches) for part in batch), strict=True)), []
        for i, (x, y) in enumerate(parts):
            if isinstance(self.model, FSDPModule):
                self.model.set_requires_gradient_sync(i == len(parts) - 1)
            elif self.name != "zero2":
                self.syncing.require_backward_grad_sync = i == len(parts) - 1
            with loss_parallel() if self.name in DTENSORS else contextlib.nullcontext():
                is_divided = self.name in DIVIDED
                of_part = self.model.loss(self.model(x), y) if is_divided else loss(self.model, x, y)
                (of_part / microbatches).backward()
            losses.append(of_part.detach())
            if self.name == "zero2" or i == len(parts) - 1:
                self.syncing.finish_gradient_sync()
        full = [one.full_tensor() if isinstance(one, DTensor) else one for one in losses]
        return torch.stack(full).mean()

    def step(self) -> dict[str, Tensor]:
        """Let the optimizer step, and return by how much each parameter has become smaller.

        With SGD and a rate of 1 that is the gradient, which each wrapper keeps in another way.
        """
        before = self.state()
        self.optimizer.step()
        return {name: before[name] - after for name, after in self.state().items()}

    def state(self) -> dict[str, Tensor]:
        """Return a copy of the full parameters and buffers, on all ranks."""
        is_sharded = self.name in ("zero3_textbook", "zero3", "hsdp", "fsdp", *DIVIDED)
        state = self.model.full_state_dict() if is_sharded else self.module.state_dict()
        return {name: tensor.detach().clone() for name, tensor in state.items()}


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


class Layer(nn.Module):
    """A block with an odd shape, a layer that all blocks share, and a frozen one."""

    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.own, self.shared, self.frozen = nn.Linear(5, 5), shared, nn.Linear(5, 5)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.own(x)) + self.shared(x) + self.frozen(x)


class Layers(nn.Module):
    """A layer before the blocks (stage 3's root), and blocks, of which the first one runs twice."""

    def __init__(self, seed: int, shares: bool = True) -> None:
        super().__init__()
        torch.manual_seed(seed)
        shared = nn.Linear(5, 5) if shares else nn.Identity()
        self.enter, self.blocks = nn.Linear(7, 5), nn.ModuleList(Layer(shared) for _ in range(3))
        self.register_buffer("scale", torch.full((1,), 1.0 + seed))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x * self.scale)
        for block in self.blocks[:-1]:
            x = block(x)
        return self.blocks[-1](x) + self.blocks[0](x)


class EitherWay(nn.Module):
    """Four layers of 512 KiB, side by side; `backwards` decides only which gradient is ready first.

    All have one shape, so a message of one, or of two, would fit where that of others is expected.
    """

    def __init__(self, seed: int, backwards: bool, width: int = 256) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(4)).double()
        self.backwards = backwards

    def forward(self, x: Tensor) -> Tensor:
        outputs = torch.zeros_like(x)
        for i, layer in list(enumerate(self.layers))[:: -1 if self.backwards else 1]:
            outputs = outputs + (i + 1) * torch.tanh(layer(x))
        return outputs


class Blocks(nn.Module):
    """Three layers of equal size, each a block."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def layers(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def few(seed: int) -> nn.Module:
    """Make a model with fewer numbers than there are ranks."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(1, 1, bias=False)).double()


def gpt(seed: int, tied: bool = True, **changes: Any) -> GPT:
    sizes = {"vocab_size": 61, "block_size": 8, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1}
    return GPT(GPTConfig(**({**sizes, "width": 14, "tied": tied} | changes)), seed=seed).double()


def deep_gpt(seed: int) -> GPT:
    return gpt(seed, num_layers=3, num_kv_heads=None)


def examples(world_size: int) -> tuple[Tensor, Tensor]:
    """Return examples for Odd; the first and last of the last rank's slice take different branches."""
    random = torch.Generator().manual_seed(1)
    x, y = torch.randn(BATCH, 7, generator=random).double(), torch.randint(3, (BATCH,), generator=random)
    x[:, :2] = -1.0
    x[-BATCH // world_size, 0] = x[-1, 1] = 1.0
    return x, y


def text(_: int = 0) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(61, (BATCH, 9), generator=torch.Generator().manual_seed(2))
    return tokens[:, :-1], tokens[:, 1:]


def ramp(_: int = 0) -> tuple[Tensor, Tensor]:
    return torch.arange(BATCH).double()[:, None] / BATCH, torch.ones(BATCH, 1).double()


def odd_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def text_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return loss_of(model(x), y)


def mean_square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


class Task(NamedTuple):
    """What is trained: `make` takes a seed, and `batch` the number of ranks."""

    make: Callable[[int], nn.Module]
    loss: Loss = odd_loss
    batch: Callable[[int], tuple[Tensor, Tensor]] = examples


def wide(_: int = 0) -> tuple[Tensor, Tensor]:
    return torch.randn(12, 256, generator=torch.Generator().manual_seed(0)).double(), torch.arange(12) % 3


BRANCHES = Task(Odd)
SIDE_BY_SIDE = Task(lambda seed: EitherWay(seed, backwards=False), odd_loss, wide)
SHARED = Task(Layers)
TEXT = Task(gpt, text_loss, text)
DEEP = Task(deep_gpt, text_loss, text)
FEW = Task(few, lambda model, x, y: (model(x) - y).square().mean(), ramp)


def heads(
    seed: int,
    frozen: Sequence[str] = ("blocks.0.attention.k_proj.bias",),
    num_layers: int = 1,
    **changes: Any,
) -> GPT:
    """Make a GPT whose 12 heads 1 to 4 ranks divide; of the gradient of a key's bias rounding is all.

    `frozen` lists prefixes of the names of frozen parameters.
    """
    sizes = {"block_size": 24, "num_heads": 12, "num_kv_heads": None, "width": 24}
    model = gpt(seed, **(sizes | changes))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(tuple(frozen)))
    return model


def heads_task(tokens: int = 12, ignored: int = 0, **changes: Any) -> Task:
    """`ignored` is the number of first targets in each row that do not count."""
    text = torch.randint(61, (4, tokens + 1), generator=torch.Generator().manual_seed(2))
    x, y = text[:, :-1], text[:, 1:].masked_fill(torch.arange(tokens) < ignored, IGNORED)
    return Task(lambda seed: heads(seed, **changes), text_loss, lambda _: (x, y))


def mine(cluster: Cluster, batch: Sequence[Tensor]) -> list[Tensor]:
    return [rank_slice(part, cluster.rank, cluster.world_size) for part in batch]


@contextlib.contextmanager
def no_sync(wrapper: Any) -> Iterator[None]:
    """Run all microbatches but the last in the block, as a lesson's loop does."""
    wrapper.require_backward_grad_sync = False
    try:
        yield
    finally:
        wrapper.require_backward_grad_sync = True


def accumulate(model: Any, loss: Loss, batch: Sequence[Tensor], microbatches: int) -> None:
    """Compute the gradients of a step, as the lessons of data parallelism do."""
    parts = list(zip(*(part.chunk(microbatches) for part in batch), strict=True))
    for i, (x, y) in enumerate(parts):
        model.require_backward_grad_sync = i == len(parts) - 1
        (loss(model, x, y) / microbatches).backward()
    model.finish_gradient_sync()


def mean_gradients(module: nn.Module) -> dict[str, Tensor]:
    """Return the gradient of each trained parameter. Unused parameters have zeros, which torch leaves out."""
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in trained.items()}


def one_process(module: nn.Module, loss: Callable[[nn.Module], Tensor]) -> dict[str, Tensor]:
    """Return the gradients that one process gets from the loss over the global batch, and leave them there.

    An unused parameter has zeros, as in every wrapper: so weight decay moves it, too.
    """
    module.zero_grad()
    loss(module).backward()
    found = mean_gradients(module)
    for name, gradient in found.items():
        module.get_parameter(name).grad = gradient.clone()
    return found


def in_pairs(cluster: Cluster) -> tuple[dist.ProcessGroup, int, int]:
    """Form groups of ranks 0 and 2, and 1 and 3. Return the own group, its number, and the rank in it."""
    group = own_group([[0, 2], [1, 3]])
    return group, cluster.rank % 2, cluster.rank // 2


def compare_with_one_process(
    cluster: Cluster,
    name: str,
    task: Task,
    microbatches: Sequence[int] = (1, 2, 3),
    optimizer: str = "sgd",
    clip: float | None = None,
    make: Callable[[int], nn.Module] | None = None,
    **options: Any,
) -> Trained:
    """Compare a step for each number of microbatches; each rank begins with weights of its own.

    `make` makes this rank's model, if it differs.
    """
    what = f"{name}, {optimizer}, {cluster.world_size} ranks"
    batch, reference = task.batch(cluster.world_size), task.make(0)
    ours = Trained(name, (make or task.make)(cluster.rank), optimizer, **options)
    optimizer_class, defaults = OPTIMIZERS[optimizer]
    theirs = optimizer_class(reference.parameters(), **defaults)
    assert_same(ours.state(), reference.state_dict(), 0, f"initial parameter, {what},")
    for step, count in enumerate(microbatches):
        losses = []

        def loss_of_all(model: nn.Module, losses: list = losses) -> Tensor:
            losses.append(task.loss(model, *batch))
            return losses[0]

        expected = one_process(reference, loss_of_all)
        if name in OF_PARAMETERS:
            ours.optimizer.zero_grad()
        else:
            ours.optimizer.zero_grad(set_to_none=step % 2 == 0)
        loss = ours.accumulate(task.loss, batch if name in DIVIDED else mine(cluster, batch), count)
        if clip is not None:
            norm = nn.utils.clip_grad_norm_(reference.parameters(), clip)
            assert_same({"norm": ours.syncing.clip_grad_norm_(clip)}, {"norm": norm}, what=f"norm, {what},")
            expected = mean_gradients(reference)
        for parameter in reference.parameters():
            if name == "ddp" and parameter.grad is not None and not parameter.grad.any():
                parameter.grad = None  # torch's DDP leaves out what no rank has used
        theirs.step()
        change = ours.step()
        if optimizer == "sgd":
            found = {parameter: change[parameter] for parameter in expected}
            assert_same(found, expected, what=f"gradient, {what}, step {step},")
        assert_same(ours.state(), reference.state_dict(), what=f"parameter, {what}, step {step},")
        # Last, because on a GPU the next step would wait for it, and so for all that was sent before.
        all_reduce(loss, op="mean", group=options.get("group"))
        assert_same({"loss": loss}, {"loss": losses[0].detach()}, what=f"loss, {what}, step {step},")
    return ours
