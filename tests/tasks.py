"""Small models, their batches and losses, which the tests train: each has what a wrapper may do wrong."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab.models.model import GPT, IGNORED, GPTConfig, loss_of

BATCH = 72  # 1 to 4 ranks divide it, and 1 to 3 microbatches divide a rank's slice
X = torch.randn(12, 3, generator=torch.Generator().manual_seed(0)).double()

Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


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
