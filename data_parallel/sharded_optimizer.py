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
from torch import Tensor
from torch.optim import Optimizer

from comm import cost
from comm.collectives import Group, all_gather, all_reduce, broadcast, default_pattern
from data_parallel.elementwise import refuse_unless_elementwise
from data_parallel.flat import Bucket, Piece, fill
from data_parallel.guard import replace_hook
from data_parallel.in_order import InOrder
from data_parallel.shard_guard import ANOTHER_BACKWARD, ShardGuard
from lab.errors import WorkbookError
from lab.ledger import Traffic
from training.clipping import clip_grad_norm_
from training.gradient_part import GradientPart

MIB = 1 << 20


class ShardedOptimizer(Optimizer):
    """A torch optimizer of an elementwise class, on each rank of `group` for its shard, with `defaults`.

    `params` are a model's parameters, or groups of them, in any form torch's optimizers take. They become
    rank 0's; buffers, which an optimizer does not see, do not (DDP's do, before every forward). Call
    `finish_gradient_sync()` after the (last) backward, or let `step()` do it. Several microbatches: divide
    each one's loss by their number, and run all but the last inside `no_sync()`. Learning rate schedulers and
    torch.amp.GradScaler work as with the class itself. Raises WorkbookError for a class that looks at a
    parameter as a whole.

    What it does not do: leave gradients in the model (clip with `clip_grad_norm_` here; torch's own is
    refused), reduce sparse ones, load another rank's state, or train parameters that are unfrozen, replaced
    (give them to `add_param_group`) or cast after it was made: the next `finish_gradient_sync` refuses them.
    """

    sends_each_microbatch = False

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
        self._class, self._defaults = optimizer_class, defaults
        self._caps = int(min(first_mb, bucket_mb) * MIB), int(bucket_mb * MIB)
        self.inner: Optimizer | None = None
        self.buckets: list[Bucket] = []
        self.pieces: list[Piece] = []
        self._place: dict[Tensor, tuple[Bucket, int]] = {}
        self._guard = ShardGuard()
        self._fired: set[Tensor] = set()
        self._used: set[Tensor] = set()
        self._synchronising, self._is_synced, self._has_gradients = True, False, False
        self._is_over, self._is_stale = False, False  # stepped since zero_grad(); and then another backward
        # torch's own reading of all the forms that parameters can be given in.
        reading = optimizer_class(params, **defaults)
        super().__init__(reading.param_groups, reading.defaults)  # which adds each group
        if not self.buckets:
            raise WorkbookError(f"{type(self).__name__} was given no parameter that is trained.")
        # One state and one set of options, whoever looks at them: schedulers, checkpoints, the inner one.
        self.param_groups, self.state = self.inner.param_groups, self.inner.state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Train further parameters from now on; all ranks call it, between two steps."""
        if self._fired:
            raise WorkbookError("add_param_group() came in the middle of a step: call it after zero_grad().")
        options = self._class([param_group], **self._defaults).param_groups[0]
        if any(parameter in self._place for parameter in options["params"]):
            raise WorkbookError("add_param_group() was given a parameter that another group has.")
        for parameter in options["params"]:
            broadcast(parameter.data, root=0, group=self.group)
        rank, ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        trained = [parameter for parameter in options["params"] if parameter.requires_grad][::-1]
        caps = self._caps if not self.buckets else (self._caps[1], self._caps[1])
        for positions in fill(trained, *caps):
            bucket = Bucket(f"bucket {len(self.buckets)}", [trained[at] for at in positions], rank, ranks)
            self.buckets.append(bucket)
            self.pieces += bucket.pieces
            self._place |= {piece.parameter: (bucket, at) for at, piece in enumerate(bucket.pieces)}
            self.add_bucket(bucket)
            for piece in bucket.pieces:
                replace_hook(piece.parameter, self._on_gradient)
        self._guard.watch(options["params"])
        self._launches = InOrder(len(self.buckets), lambda k: self.launch(self.buckets[k]))
        mine = {piece.parameter: piece.tensor for piece in self.pieces}
        names = options.get("param_names", [None] * len(options["params"]))
        kept = [(p, name) for p, name in zip(options["params"], names, strict=True) if p in mine]
        options |= {"params": [mine[parameter] for parameter, _ in kept]}
        options |= {"param_names": [name for _, name in kept]} if "param_names" in options else {}
        if self.inner is None:
            self.inner = self._class([options], **self._defaults)
        else:
            self.inner.add_param_group(options)

    def add_bucket(self, bucket: Bucket) -> None:
        """The stage's: make room for the bucket's gradients."""
        raise NotImplementedError

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
        flags = [piece.parameter in self._used for piece in self.pieces] + [self._guard.has_trouble()]
        used = torch.tensor(flags, dtype=torch.uint8).to(self.buckets[0].full.device)
        all_reduce(used, op="max", group=self.group, pattern=self.pattern)
        *used_somewhere, in_trouble = used.tolist()
        self._used.clear()
        self._guard.refuse_if(in_trouble)
        if self._is_stale:
            raise WorkbookError("A backward came after step(): call the optimizer's zero_grad() in between.")
        flag = iter(used_somewhere)
        for bucket in self.buckets:
            parts = bucket.flat.pieces(self.gradient_shard(bucket))
            for piece, (_, gradient) in zip(bucket.pieces, parts, strict=True):
                part = GradientPart.of(gradient, self.group, self.pattern)
                piece.tensor.grad = part if next(flag) else None
        self._has_gradients, self._is_synced = any(used_somewhere), True

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the gradients so that their norm over all ranks is at most `max_norm`; returns their norm."""
        if not self._is_synced:
            self.finish_gradient_sync()
        return clip_grad_norm_([piece.tensor for piece in self.pieces], max_norm, self.group, self.pattern)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """False. GradScaler asks this before it looks for infinities: by then the gradients must be here."""
        if not self._is_synced:
            self.finish_gradient_sync()
        return False

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update this rank's shard, and gather everybody's."""
        result = None if closure is None else closure()
        if not self._is_synced:
            self.finish_gradient_sync()
        if not self._has_gradients:
            raise WorkbookError(
                "step() came, and no rank has a gradient of any parameter: call zero_grad() before the "
                "backward, and make the optimizer again if the model's parameters were replaced since."
            )
        for piece in self.pieces:
            piece.parameter.grad = None  # what a GAN's other backward leaves here is dropped by zero_grad()
        self._is_over = True
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
        if self._fired:  # a backward that no step follows, as the generator's through a GAN's discriminator
            self._complete_buckets()
        self._used.clear()
        for piece in self.pieces:
            piece.parameter.grad = piece.tensor.grad = None
        self._is_synced = self._is_over = self._is_stale = False

    def traffic_per_step(self, reductions: int = 1, is_clipped: bool = False) -> Traffic:
        """What the formula says a step sends: the gradients so many times, the parameters, who used what."""
        place = (dist.get_world_size(self.group), dist.get_rank(self.group))
        pattern = self.pattern or default_pattern("all_gather", self.group)

        def one(op: str, numel: int, itemsize: int) -> Traffic:
            return cost.per_rank(op, pattern, numel, itemsize, *place)

        total = one("all_reduce", len(self.pieces) + 1, 1)
        total += one("all_reduce", 1, 4) if is_clipped else Traffic()
        for bucket in self.buckets:
            size = bucket.full.numel(), bucket.full.itemsize
            total += one("all_gather", *size) + sum([one("reduce_scatter", *size)] * reductions, Traffic())
        return total

    def state_dict(self) -> dict[str, Any]:
        """This rank's own state, and whose shard it is of."""
        return super().state_dict() | {"shard": self._shard()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load this rank's own, of an equal run (of another one: data_parallel.sharded_checkpoint).

        All ranks call it; all raise WorkbookError if one was given another rank's.
        """
        is_other = torch.tensor([state_dict.get("shard") != self._shard()], dtype=torch.uint8)
        is_other = is_other.to(self.buckets[0].full.device)
        all_reduce(is_other, op="max", group=self.group, pattern=self.pattern)
        if is_other:
            raise WorkbookError(
                "The state of a sharded optimizer fits its own rank of an equal run only, and a rank was "
                "given another: let each save and load its own, or use data_parallel.sharded_checkpoint."
            )
        self.inner.load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})
        self.param_groups, self.state = self.inner.param_groups, self.inner.state

    def _shard(self) -> dict[str, Any]:
        pieces = [[piece.start, piece.tensor.numel()] for piece in self.pieces]
        return {"rank": dist.get_rank(self.group), "pieces": pieces}

    def _on_gradient(self, parameter: Tensor) -> None:
        if not self._guard.has_gradient(parameter):
            return
        if self._is_synced and not self._is_over:
            raise WorkbookError("A backward came after finish_gradient_sync(): call zero_grad() in between.")
        self._is_stale, self._is_synced = self._is_over, False
        if parameter in self._fired:
            if self._synchronising:
                raise WorkbookError(ANOTHER_BACKWARD)
            self._complete_buckets()  # the next microbatch inside one no_sync()
        self._used.add(parameter)
        self.keep(*self._place[parameter])
        if self._synchronising:
            parameter.grad = self._guard.taken(parameter)
        if self._synchronising or self.sends_each_microbatch:
            self._complete(parameter)

    def _complete(self, parameter: Tensor) -> None:
        self._fired.add(parameter)
        bucket, _ = self._place[parameter]
        if all(piece.parameter in self._fired for piece in bucket.pieces):
            self._launches.ready(self.buckets.index(bucket))

    def _complete_buckets(self) -> None:
        for piece in self.pieces:
            parameter = piece.parameter
            if parameter not in self._fired:
                if parameter.grad is None or not self._guard.is_in_place(parameter):
                    self.keep_zero(*self._place[parameter])
                else:  # of an earlier microbatch, or computed after the backward
                    self._used.add(parameter)
                    self.keep(*self._place[parameter])
                self._complete(parameter)
        self.wait()
        self._launches.reset()
        self._fired.clear()
