"""The table of all wrappers: how each is made, and what it does. The tests select rows by what they do.

A new wrapper is one more row. It then trains, clips, sends and refuses in the tests of all that do the same.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from comm.collectives import Group, use_pattern
from comm.wire.groups import own_group
from context_parallel.parallel_model import ContextParallel
from data_parallel import train_ddp
from data_parallel.train_bucket_overlap import BucketDataParallel
from data_parallel.train_naive import NaiveDataParallel
from data_parallel.train_overlap import OverlapDataParallel
from lab.models.model import GPT, loss_of
from low_communication.train_compressed import CompressedDataParallel
from low_communication.train_hsdp import HybridShardedDataParallel
from tensor_parallel.parallelize import parallelize
from tensor_parallel.train_dtensor import DTensorGPT
from tests.context_parallel.equivalence import ALL_TO_ALL, CONTIGUOUS_RING, RING, TEXTBOOK_RING, Variant
from zero.train_fsdp import shard
from zero.train_zero1 import ZeroOptimizer
from zero.train_zero1_textbook import TextbookZeroOptimizer
from zero.train_zero2 import ZeroGradientOptimizer
from zero.train_zero3 import FullyShardedDataParallel
from zero.train_zero3_textbook import TextbookFullyShardedDataParallel

TINY = 1e-6  # MiB, so that each parameter has a bucket


@dataclass(frozen=True)
class Wrapper:
    """A way to train on several ranks. Its `name` appears in the ids of tests."""

    name: str
    lesson: str  # the folder
    # (module, group=None, **options) -> nn.Module, or, of an optimizer,
    # (parameters, optimizer_class, group=None, **options) -> Optimizer
    make: Callable[..., Any]
    is_optimizer: bool = False
    by_torch: bool = False  # it is PyTorch's own
    stage: int = 0  # of ZeRO: 1 divides the optimizer's state, 2 the gradients too, 3 the parameters too
    takes_any_model: bool = True  # with tied, frozen and unused parameters, and blocks that run twice
    takes_full_batch: bool = False  # each rank has all of it, because the model or the tokens are divided
    takes_group: bool = True
    overlaps: bool = False  # it sends gradients of parameters while the backward computes
    clips: bool = False  # it has a clip_grad_norm_, because no rank has all gradients

    def __str__(self) -> str:
        return self.name

    def __reduce__(self) -> tuple[Callable[[str], "Wrapper"], tuple[str]]:
        """Let a rank take its own row, in which a learner's class may stand in a lesson's place."""
        return named, (self.name,)

    @property
    def is_replica(self) -> bool:
        """Whether each rank has all parameters, gradients and optimizer state."""
        return self.stage == 0 and not self.takes_full_batch

    @property
    def is_divided(self) -> bool:
        """Whether no rank's module has all parameters, so that the wrapper gathers the full state."""
        return self.stage == 3 or self.takes_full_batch


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


def hybrid(module: nn.Module, **options: Any) -> nn.Module:
    """Shard within two machines of equally many ranks or, if their number is odd, keep all as replicas."""
    n = dist.get_world_size()
    size = n // 2 if n % 2 == 0 else 1
    machines = [list(range(first, first + size)) for first in range(0, n, size)]
    shards = own_group(machines, "shards")
    replicas = own_group([list(ranks) for ranks in zip(*machines, strict=True)], "replicas")
    return HybridShardedDataParallel(module, shards, replicas, **options)


def fsdp(module: nn.Module, **options: Any) -> nn.Module:
    model = shard(module, torch.device("cpu"), **options)
    model.finish_gradient_sync = lambda: None
    return model


def dtensor(module: GPT, sequence_parallel: bool) -> nn.Module:
    model = DTensorGPT(module, module.token_embedding.weight.device, sequence_parallel)
    model.loss = loss_of
    return model


def cut(variant: Variant) -> Callable[..., nn.Module]:
    """`change` changes the model that is cut, before it is used."""

    def wrap(module: GPT, group: Group = None, change: Callable[[GPT], None] | None = None) -> nn.Module:
        model = ContextParallel(module, variant.attention, variant.cut, variant.kernel, group)
        if change is not None:
            change(module)
        return model

    return wrap


# Each class is looked up only when it is called, because an exercise may have replaced it.
WRAPPERS = (
    Wrapper("naive", "data_parallel", lambda module, group=None: NaiveDataParallel(module, group)),
    Wrapper(
        "overlap",
        "data_parallel",
        lambda module, group=None: OverlapDataParallel(module, group),
        overlaps=True,
    ),
    Wrapper(
        "a bucket for each",
        "data_parallel",
        lambda module, group=None: BucketDataParallel(module, group, bucket_mb=TINY),
        overlaps=True,
    ),
    Wrapper(
        "buckets",
        "data_parallel",
        lambda module, group=None: BucketDataParallel(module, group, bucket_mb=5e-4),
        overlaps=True,
    ),
    Wrapper("one bucket", "data_parallel", one_bucket, overlaps=True),
    Wrapper("ddp", "data_parallel", Ddp, by_torch=True, overlaps=True),
    Wrapper(
        "compressed",
        "low_communication",
        lambda module, group=None: CompressedDataParallel(module, "float32", group),
        overlaps=True,
    ),
    Wrapper(
        "zero1_textbook",
        "zero",
        lambda *parameters, **options: TextbookZeroOptimizer(*parameters, **options),
        stage=1,
        is_optimizer=True,
        clips=True,
    ),
    Wrapper(
        "zero1",
        "zero",
        lambda *parameters, **options: ZeroOptimizer(*parameters, **options),
        stage=1,
        is_optimizer=True,
        overlaps=True,
        clips=True,
    ),
    Wrapper(
        "zero2",
        "zero",
        lambda *parameters, **options: ZeroGradientOptimizer(*parameters, **options),
        stage=2,
        is_optimizer=True,
        overlaps=True,
        clips=True,
    ),
    Wrapper(
        "zero3_textbook",
        "zero",
        lambda module, group=None: TextbookFullyShardedDataParallel(module, group),
        stage=3,
        clips=True,
    ),
    Wrapper(
        "zero3",
        "zero",
        lambda module, group=None, **options: FullyShardedDataParallel(module, group, **options),
        stage=3,
        overlaps=True,
        clips=True,
    ),
    Wrapper(
        "hsdp",
        "low_communication",
        hybrid,
        stage=3,
        takes_group=False,  # it has two
        overlaps=True,
        clips=True,
    ),
    Wrapper(
        "fsdp",
        "zero",
        fsdp,
        by_torch=True,
        stage=3,
        takes_any_model=False,
        takes_group=False,
        overlaps=True,
    ),
    Wrapper(
        "tensor",
        "tensor_parallel",
        lambda module, group=None, **options: parallelize(module, group, False, **options),
        takes_any_model=False,
        takes_full_batch=True,
        clips=True,
    ),
    Wrapper(
        "sequence",
        "tensor_parallel",
        lambda module, group=None, **options: parallelize(module, group, True, **options),
        takes_any_model=False,
        takes_full_batch=True,
        clips=True,
    ),
    *(
        Wrapper(
            name, "context_parallel", cut(variant), takes_any_model=False, takes_full_batch=True, clips=True
        )
        for name, variant in {
            "ring": RING,
            "textbook ring": TEXTBOOK_RING,
            "contiguous ring": CONTIGUOUS_RING,
            "all to all": ALL_TO_ALL,
        }.items()
    ),
    *(
        Wrapper(
            name,
            "tensor_parallel",
            lambda module, is_sequence=is_sequence: dtensor(module, is_sequence),
            by_torch=True,
            takes_any_model=False,
            takes_full_batch=True,
            takes_group=False,
        )
        for name, is_sequence in {"dtensor": False, "sequence dtensor": True}.items()
    ),
)


def named(name: str) -> Wrapper:
    """Return the row of a wrapper that a test is about."""
    [row] = select(name=name)
    return row


def select(**facts: object) -> list[Wrapper]:
    """Return the rows whose attributes have these values, such as `overlaps=True`."""
    return [row for row in WRAPPERS if all(getattr(row, name) == fact for name, fact in facts.items())]


def for_each(wrappers: list[Wrapper]) -> pytest.MarkDecorator:
    """Run a test for each of these rows. The ids are a list, which a learner's check can read."""
    return pytest.mark.parametrize("wrapper", wrappers, ids=[row.name for row in wrappers])
