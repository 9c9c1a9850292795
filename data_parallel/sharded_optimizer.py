"""What stages 1 and 2 of ZeRO share: each rank's optimizer has its shard of the parameters.

      backward       gradients ── reduce-scatter ──► mean gradient of my shard     in buckets, early
      step           my shard of the optimizer's state updates my shard of the parameters
                     my shard ── all-gather ──► all parameters

The parameters live in flat buckets (data_parallel.flat), `param.data` is a view of one. How gradients get to
their owners differs from stage to stage: train_zero1.py, train_zero2.py.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from comm import cost
from comm.collectives import Group, all_gather, all_reduce, broadcast, default_pattern
from data_parallel.flat import Flat, Piece, fill
from data_parallel.in_order import InOrder
from lab.errors import WorkbookError
from lab.ledger import Traffic

MIB = 1 << 20


class Bucket:
    """Some parameters in one flat tensor; `shard` is this rank's part of it, `pieces` what it has of each."""

    def __init__(self, name: str, parameters: list[nn.Parameter], rank: int, ranks: int) -> None:
        self.name, self.flat = name, Flat(parameters, rank, ranks)
        self.full = parameters[0].new_zeros(self.flat.numel)
        for parameter, view in zip(parameters, self.flat.views(self.full), strict=True):
            view.copy_(parameter.detach())
            parameter.data = view
        self.shard = self.full[self.flat.mine]
        self.pieces = [
            Piece(parameter, start, nn.Parameter(part))
            for parameter, (start, part) in zip(parameters, self.flat.pieces(self.shard), strict=True)
        ]


class ShardedOptimizer(Optimizer):
    """A torch optimizer of an elementwise class, on each rank of `group` for its shard, with `defaults`.

    `params` are a model's parameters, or groups of them, in any form torch's optimizers take. They become
    rank 0's; buffers, which an optimizer does not see, do not. Call `finish_gradient_sync()` after the (last)
    backward, or let `step()` do it. Several microbatches: divide each one's loss by their number, and run all
    but the last inside `no_sync()`. Learning rate schedulers work as with the class itself. Raises
    WorkbookError for a class that looks at a parameter as a whole.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: type[Optimizer],
        group: Group = None,
        pattern: str | None = None,
        bucket_mb: float = 4.0,
        first_mb: float = 0.25,
        **defaults: Any,
    ) -> None:
        refuse_unless_elementwise(optimizer_class, defaults)
        self.group, self.pattern = group, pattern
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        # torch's own reading of all the forms that parameters can be given in.
        whole = optimizer_class(params, **defaults)
        self.buckets: list[Bucket] = []
        for options in whole.param_groups:
            for parameter in options["params"]:
                broadcast(parameter.data, root=0, group=group)
            trained = [parameter for parameter in options["params"] if parameter.requires_grad][::-1]
            for positions in fill(trained, int(min(first_mb, bucket_mb) * MIB), int(bucket_mb * MIB)):
                name = f"bucket {len(self.buckets)}"
                self.buckets.append(Bucket(name, [trained[at] for at in positions], rank, ranks))
        if not self.buckets:
            raise WorkbookError(f"{type(self).__name__} was given no parameter that is trained.")
        self.pieces = [piece for bucket in self.buckets for piece in bucket.pieces]
        mine = {piece.parameter: piece.tensor for piece in self.pieces}
        groups = [
            {**options, "params": [mine[parameter] for parameter in options["params"] if parameter in mine]}
            for options in whole.param_groups
        ]
        self.inner = optimizer_class(groups, **defaults)
        super().__init__([{**options} for options in self.inner.param_groups], self.inner.defaults)
        # One state and one set of options, whoever looks at them: schedulers, checkpoints, the inner one.
        self.param_groups, self.state = self.inner.param_groups, self.inner.state
        self._place = {
            piece.parameter: (bucket, position)
            for bucket in self.buckets
            for position, piece in enumerate(bucket.pieces)
        }
        self._launches = InOrder(len(self.buckets), lambda k: self.launch(self.buckets[k]))
        self._fired: set[nn.Parameter] = set()
        self._used: set[nn.Parameter] = set()
        self._synchronising, self._is_synced = True, False
        for piece in self.pieces:
            piece.parameter.register_post_accumulate_grad_hook(self._on_gradient)

    def keep(self, bucket: Bucket, position: int) -> None:
        """The stage's: the gradient of that parameter of the bucket is complete on this rank."""
        raise NotImplementedError

    def keep_zero(self, bucket: Bucket, position: int) -> None:
        """The stage's: that parameter has no gradient on this rank."""
        raise NotImplementedError

    def launch(self, bucket: Bucket) -> None:
        """The stage's: start the reduce-scatter of the bucket; called in the same order on all ranks."""
        raise NotImplementedError

    def wait(self) -> None:
        """The stage's: wait for all that was launched."""
        raise NotImplementedError

    def gradient_shard(self, bucket: Bucket) -> Tensor:
        """The stage's: the mean gradient of the bucket's shard, once all is waited for."""
        raise NotImplementedError

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """For all but the last microbatch: gradients add up on each rank, and nothing is sent."""
        self._synchronising = False
        try:
            yield
        finally:
            self._synchronising = True

    def finish_gradient_sync(self) -> None:
        """Complete and start the buckets that still miss a gradient, and wait: then the pieces have theirs.

        A parameter that only some ranks used counts as zero on the others; one that no rank used has no
        gradient, and the optimizer leaves it alone.
        """
        self._complete_buckets()
        used = torch.tensor([piece.parameter in self._used for piece in self.pieces], dtype=torch.uint8)
        used = used.to(self.buckets[0].full.device)
        all_reduce(used, op="max", group=self.group, pattern=self.pattern)
        used_somewhere = iter(used.tolist())
        for bucket in self.buckets:
            parts = bucket.flat.pieces(self.gradient_shard(bucket))
            for piece, (_, gradient) in zip(bucket.pieces, parts, strict=True):
                piece.tensor.grad = gradient if next(used_somewhere) else None
        self._used.clear()
        self._is_synced = True

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the gradients so that their norm over all ranks is at most `max_norm`; returns their norm."""
        if not self._is_synced:
            self.finish_gradient_sync()
        return clip_grad_norm_([piece.tensor for piece in self.pieces], max_norm, self.group, self.pattern)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update this rank's shard, and gather everybody's."""
        result = None if closure is None else closure()
        if not self._is_synced:
            self.finish_gradient_sync()
        self.inner.step()
        self.gather_parameters()
        return result

    def gather_parameters(self) -> None:
        """Make all parameters what the ranks' pieces are."""
        gathers = [
            all_gather(bucket.full, bucket.shard, group=self.group, async_op=True, pattern=self.pattern)
            for bucket in self.buckets
        ]
        for handle in gathers:
            handle.wait()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of the step before, on the model and on the pieces."""
        for piece in self.pieces:
            piece.parameter.grad = piece.tensor.grad = None
        self._is_synced = False

    def traffic_per_step(self, reductions: int = 1, is_clipped: bool = False) -> Traffic:
        """What the formula says a step sends: the gradients so many times, the parameters, who used what."""
        place = (dist.get_world_size(self.group), dist.get_rank(self.group))
        pattern = self.pattern or default_pattern("all_gather", self.group)

        def one(op: str, numel: int, itemsize: int) -> Traffic:
            return cost.per_rank(op, pattern, numel, itemsize, *place)

        total = one("all_reduce", len(self.pieces), 1)
        total += one("all_reduce", 1, 4) if is_clipped else Traffic()
        for bucket in self.buckets:
            size = bucket.full.numel(), bucket.full.itemsize
            total += one("all_gather", *size) + sum([one("reduce_scatter", *size)] * reductions, Traffic())
        return total

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """This rank's own, of an equal run (of another one: data_parallel.sharded_checkpoint)."""
        self.inner.load_state_dict(state_dict)
        self.param_groups, self.state = self.inner.param_groups, self.inner.state

    def _on_gradient(self, parameter: Tensor) -> None:
        if self._is_synced:
            raise WorkbookError("A backward came after finish_gradient_sync(): call zero_grad() in between.")
        if parameter in self._fired:
            raise WorkbookError(
                "Another backward began before finish_gradient_sync(): run all but the last microbatch "
                "inside no_sync()."
            )
        self._used.add(parameter)
        self.keep(*self._place[parameter])
        if self._synchronising:
            self._complete(parameter)

    def _complete(self, parameter: Tensor) -> None:
        self._fired.add(parameter)
        bucket, _ = self._place[parameter]
        if all(piece.parameter in self._fired for piece in bucket.pieces):
            self._launches.ready(self.buckets.index(bucket))

    def _complete_buckets(self) -> None:
        for piece in self.pieces:
            if piece.parameter not in self._fired:
                bucket, position = self._place[piece.parameter]
                if piece.parameter.grad is None:
                    self.keep_zero(bucket, position)
                self._complete(piece.parameter)
        self.wait()
        self._launches.reset()
        self._fired.clear()


def clip_grad_norm_(pieces: list[nn.Parameter], max_norm: float, group: Group, pattern: str | None) -> Tensor:
    """As torch.nn.utils.clip_grad_norm_ on the whole gradients: every element is in one rank's pieces."""
    gradients = [piece.grad for piece in pieces if piece.grad is not None]
    squares = [
        gradient.float().square().sum() if gradient.itemsize < 4 else gradient.square().sum()
        for gradient in gradients
    ]
    total = torch.stack(squares).sum() if squares else pieces[0].new_zeros(())
    all_reduce(total, group=group, pattern=pattern)
    norm = total.sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(scale)
    return norm


def refuse_unless_elementwise(optimizer_class: type[Optimizer], defaults: dict[str, Any]) -> None:
    """Raise WorkbookError unless two halves, each on its own, take the same steps as the whole."""
    random = torch.Generator().manual_seed(0)
    values, *gradients = torch.randn(3, 4, 6, generator=random, dtype=torch.float64)
    whole, halves = (
        nn.Parameter(values.clone()),
        [nn.Parameter(half.clone()) for half in values.view(-1).split([13, 11])],
    )
    try:
        for parameters in ([whole], halves):
            optimizer = optimizer_class(parameters, **defaults)
            for gradient in gradients:
                for parameter, part in zip(
                    parameters, gradient.view(-1).split([p.numel() for p in parameters]), strict=True
                ):
                    parameter.grad = part.view_as(parameter).clone()
                optimizer.step()
        is_elementwise = torch.equal(whole.view(-1), torch.cat(halves))
    except (TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, TypeError) and "unexpected keyword" in str(error):
            raise
        is_elementwise = False
    if not is_elementwise:
        raise WorkbookError(
            f"{optimizer_class.__name__} does not work element by element, so it cannot have a shard of a "
            "parameter; take one that does, such as SGD, Adam or AdamW."
        )
