"""Make an optimizer of shards behave as torch's do: groups, state dicts, clipping, GradScaler, errors.

How stages 1 and 2 of ZeRO train is in train_zero1.py and train_zero2.py. Both optimizers divide their
parameters with `_divide`, ask `_has_arrived` about each gradient, and find out with `_agree_on_used` which
parameters any rank used.
"""

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from comm.collectives import Group, all_reduce, broadcast
from comm.cost import expected_traffic
from data_parallel.flat import ParameterBucket, Piece, fill
from lab.launch.errors import WorkbookError
from lab.trace.ledger import Traffic
from lab.units import MIB
from training.clipping import clip_grad_norm_
from training.gradient_part import GradientPart
from zero.elementwise import refuse_unless_elementwise
from zero.gradient_arrivals import GradientArrivals
from zero.shard_guard import ShardGuard
from zero.step_guard import StepGuard


class ShardedOptimizer(Optimizer):
    """An optimizer whose parameters live in flat buckets, of which this rank trains its pieces.

    `inner` is an optimizer of `optimizer_class` over the pieces. `launch` is called with each bucket whose
    gradients are complete, in the same order on all ranks. Raises WorkbookError for a class that does not
    work element by element.
    """

    # The lessons define these: train_zero1.py, train_zero2.py.
    finish_gradient_sync: Callable[[], None]
    _drop_gradients: Callable[[], None]

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: type[Optimizer],
        defaults: dict[str, Any],
        group: Group,
        pattern: str | None,
        bucket_mb: tuple[float, float],
        launch: Callable[[ParameterBucket], None],
    ) -> None:
        refuse_unless_elementwise(optimizer_class, defaults)
        self.group, self.pattern = group, pattern
        self._class, self._defaults = optimizer_class, defaults
        self._caps = int(min(bucket_mb) * MIB), int(bucket_mb[1] * MIB)
        self.inner: Optimizer | None = None
        self.buckets: list[ParameterBucket] = []
        self.pieces: list[Piece] = []
        self._arrivals = GradientArrivals(launch)
        self._guard, self._steps = ShardGuard(), StepGuard()
        self._used: set[Tensor] = set()  # parameters that have a gradient on this rank
        # torch's own reading of all the forms that parameters can be given in.
        reading = optimizer_class(params, **defaults)
        super().__init__(reading.param_groups, reading.defaults)  # which adds each group
        if not self.buckets:
            raise WorkbookError(f"{type(self).__name__} was given no parameter that is trained.")
        # Schedulers and checkpoints must see the state and the options that the inner optimizer has.
        self.param_groups, self.state = self.inner.param_groups, self.inner.state

    def _divide(self, param_group: dict[str, Any]) -> list[ParameterBucket]:
        """Make a group's parameters rank 0's, move them into buckets, and let `inner` train the pieces.

        Return the buckets. All ranks must call it, between two steps.
        """
        if self._arrivals:
            raise WorkbookError("add_param_group() came in the middle of a step: call it after zero_grad().")
        options = self._class([param_group], **self._defaults).param_groups[0]
        known = {piece.parameter for piece in self.pieces}
        if any(parameter in known for parameter in options["params"]):
            raise WorkbookError("add_param_group() was given a parameter that another group has.")
        for parameter in options["params"]:
            broadcast(parameter.data, root=0, group=self.group)
        rank, ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        trained = [parameter for parameter in options["params"] if parameter.requires_grad][::-1]
        caps = self._caps if not self.buckets else (self._caps[1], self._caps[1])
        added = []
        for positions in fill(trained, *caps):
            parameters = [trained[at] for at in positions]
            added.append(ParameterBucket(f"bucket {len(self.buckets)}", parameters, rank, ranks))
            self.buckets.append(added[-1])
            self.pieces += added[-1].pieces
            self._arrivals.add_bucket(added[-1])
        self._guard.add(options["params"])
        mine = {piece.parameter: piece.tensor for piece in self.pieces}
        names = options.get("param_names", [None] * len(options["params"]))
        kept = [(p, name) for p, name in zip(options["params"], names, strict=True) if p in mine]
        options |= {"params": [mine[parameter] for parameter, _ in kept]}
        options |= {"param_names": [name for _, name in kept]} if "param_names" in options else {}
        if self.inner is None:
            self.inner = self._class([options], **self._defaults)
        else:
            self.inner.add_param_group(options)
        return added

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Let gradients of microbatches add up: run all backwards but the last one inside."""
        return self._steps.no_sync()

    def _has_arrived(self, parameter: Tensor) -> bool:
        """Return whether the gradient of a hook's parameter is there, and note that the parameter is used.

        Raises WorkbookError if the backward comes between calls where it would lose gradients
        (step_guard.py).
        """
        if not self._guard.has_gradient(parameter):
            return False
        self._steps.before_gradient(is_second=parameter in self._arrivals)
        if self._steps.drops_a_backward():
            gradient, parameter.grad = parameter.grad, None  # it is not one of those that are dropped
            self._drop_gradients()
            parameter.grad = gradient
            self._used.clear()
        self._used.add(parameter)
        return True

    def _has_unsent_gradient(self, parameter: Tensor) -> bool:
        """Return whether there is a gradient that was not sent, as an earlier microbatch leaves one."""
        if parameter.grad is None or not self._guard.is_in_place(parameter):
            return False
        self._used.add(parameter)
        return True

    def _agree_on_used(self) -> set[Tensor]:
        """Return the parameters that any rank used. Raises WorkbookError if any rank refuses the step."""
        flags = [piece.parameter in self._used for piece in self.pieces] + [self._guard.has_trouble()]
        used = torch.tensor(flags, dtype=torch.uint8).to(self.buckets[0].full.device)
        all_reduce(used, op="max", group=self.group, pattern=self.pattern)
        *used_somewhere, in_trouble = used.tolist()
        self._used.clear()
        self._guard.refuse_if(in_trouble)
        self._steps.before_sync()
        self._steps.synced(has_gradients=any(used_somewhere))
        return {piece.parameter for piece, flag in zip(self.pieces, used_somewhere, strict=True) if flag}

    def _give_gradients(self, bucket: ParameterBucket, shard: Tensor, used: set[Tensor]) -> None:
        """Give each piece its part of the shard of gradients; no gradient if no rank used the parameter."""
        for piece, (_, gradient) in zip(bucket.pieces, bucket.flat.pieces(shard), strict=True):
            part = GradientPart.of(gradient, self.group, self.pattern)
            piece.tensor.grad = part if piece.parameter in used else None

    def _before_step(self) -> None:
        """Raise WorkbookError if there is no gradient to train with; remove the placeholders in the model."""
        self._steps.before_step()
        for piece in self.pieces:
            piece.parameter.grad = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set the gradients of the model and of the pieces to None, and wait for what is still being sent.

        Gradients are still in flight if no step followed the backward: those that the generator's backward
        of a GAN leaves in the discriminator, for example. `set_to_none=False` does the same, because
        gradients of zeros would have no memory.
        """
        self._drop_gradients()
        self._used.clear()
        for piece in self.pieces:
            piece.parameter.grad = piece.tensor.grad = None
        self._steps.begin()

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the gradients so that their norm over all ranks is at most `max_norm`; returns their norm."""
        if not self._steps.is_synced:
            self.finish_gradient_sync()
        return clip_grad_norm_([piece.tensor for piece in self.pieces], max_norm, self.group, self.pattern)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Synchronise gradients and return False: GradScaler asks this before it looks for infinities."""
        if not self._steps.is_synced:
            self.finish_gradient_sync()
        return False

    def traffic_per_step(self, reductions: int = 1, is_clipped: bool = False) -> Traffic:
        """Return a step's expected traffic: gradients, parameters, and flags of which parameters are used."""

        def one(op: str, numel: int, itemsize: int) -> Traffic:
            return expected_traffic(op, self.pattern, numel, itemsize, self.group)

        total = one("all_reduce", len(self.pieces) + 1, 1)
        total += one("all_reduce", 1, 8) if is_clipped else Traffic()
        for bucket in self.buckets:
            size = bucket.full.numel(), bucket.full.itemsize
            total += one("all_gather", *size) + sum([one("reduce_scatter", *size)] * reductions, Traffic())
        return total

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's own state, and a description of its shard."""
        return super().state_dict() | {"shard": self._shard()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state that this rank saved in an equal run; for other runs use sharded_checkpoint.py.

        All ranks call it; all raise WorkbookError if one was given another state.
        """
        is_other = torch.tensor([state_dict.get("shard") != self._shard()], dtype=torch.uint8)
        is_other = is_other.to(self.buckets[0].full.device)
        all_reduce(is_other, op="max", group=self.group, pattern=self.pattern)
        if is_other:
            raise WorkbookError(
                "The state of a sharded optimizer fits its own rank of an equal run only, and a rank was "
                "given another state: let each rank save and load its own, or use "
                "zero.sharded_checkpoint."
            )
        self.inner.load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})
        self.param_groups, self.state = self.inner.param_groups, self.inner.state

    def _shard(self) -> dict[str, Any]:
        pieces = [[piece.start, piece.tensor.numel()] for piece in self.pieces]
        return {"rank": dist.get_rank(self.group), "pieces": pieces}
