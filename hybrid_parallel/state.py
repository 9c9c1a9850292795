"""Say which elements of the full model and of its optimizer's state a rank of a mesh has.

      axis        what a rank has of the model      what it saves
      pipeline    the parameters of its stages      those; a tied parameter only on its first stage
      tensor      an n-th along one dimension       its box, without rows that pad a vocabulary
                  some parameters in full           those, but only on the first tensor rank
      data and    with ZeRO, a range of elements    its range
      context     without ZeRO, all elements        some of the parameters: about an n-th of the elements
      expert      some experts of each block        those, but only on the first rank that holds them

AdamW's two moments have the same elements as the parameters, and are saved in the same way. The number of
steps that the optimizer has taken is the same for all parameters, so it is one number in `extra` (run.py).
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hybrid_parallel.checkpoint_pieces import Box, Piece
from hybrid_parallel.clipping import counted_elsewhere
from hybrid_parallel.expert_axis import experts_of
from hybrid_parallel.hybrid import HybridParallel
from lab.launch.errors import WorkbookError
from lab.models.model import GPT

STATES = ("exp_avg", "exp_avg_sq")  # of AdamW, one number for each of the parameter's


class Held(NamedTuple):
    """Holds what this rank trains of one parameter: a flat range of its local tensor, from `start` on."""

    name: str
    parameter: Tensor
    tensor: nn.Parameter
    start: int


def first_names(hybrid: HybridParallel) -> dict[str, str]:
    """Return a dictionary from the second name of each tied tensor to its first name."""
    is_tied = isinstance(hybrid.plain, GPT) and hybrid.plain.config.tied
    return {"head.weight": "token_embedding.weight"} if is_tied else {}


def held(hybrid: HybridParallel) -> list[Held]:
    """Return what this rank's optimizer trains, each parameter once."""
    first = first_names(hybrid)
    names = {p: first.get(name, name) for name, p in hybrid.named_parameters().items()}
    if hybrid.sizes.zero:
        return [Held(names[p.parameter], p.parameter, p.tensor, p.start) for p in hybrid.pieces]
    return [Held(name, parameter, parameter, 0) for parameter, name in names.items()]


def pieces_of(hybrid: HybridParallel) -> list[Piece]:
    """Return this rank's pieces of the model and of AdamW's state, which starts with zeros if it is empty."""
    is_copy = counted_elsewhere(hybrid.pipeline, hybrid.tensor)
    own = dist.get_rank(hybrid.mesh.replicas)
    pieces: list[Piece] = []
    for one, saved_by in _with_replicas(hybrid):
        state = hybrid.optimizer.state[one.tensor]
        if not state:
            zeros = {name: torch.zeros_like(one.tensor) for name in STATES}
            state.update({"step": torch.tensor(0.0)} | zeros)
        for kind, tensor in [("model", one.tensor), *((f"optimizer/{name}", state[name]) for name in STATES)]:
            shape, box, numel = _place(hybrid, one)
            flat = tensor.detach().view(-1)[:numel]
            is_replica = saved_by != own or one.parameter in is_copy
            pieces.append(Piece(f"{kind}/{one.name}", flat, shape, box, one.start, is_replica))
    return pieces


def _with_replicas(hybrid: HybridParallel) -> Iterator[tuple[Held, int]]:
    """Yield what this rank trains, each with the place among the replicas of the rank that saves it.

    Without ZeRO all replicas hold the same, but for experts, and each parameter goes to the one that has the
    fewest elements to save so far.
    """
    elements = [0] * hybrid.sizes.replicas
    own, experts = dist.get_rank(hybrid.mesh.replicas), set(experts_of(hybrid.module))
    for one in held(hybrid):
        if hybrid.sizes.zero:
            yield one, own
        elif one.parameter in experts:
            yield one, own % hybrid.sizes.expert_ranks  # of the first of the replicas that hold this expert
        else:
            replica = elements.index(min(elements))
            elements[replica] += one.tensor.numel()
            yield one, replica


def _place(hybrid: HybridParallel, one: Held) -> tuple[tuple[int, ...], Box | None, int]:
    """Return the full shape, this rank's box in it, and the number of elements that are not padding."""
    local = tuple(one.parameter.shape)
    if hybrid.tensor is None or one.name not in hybrid.tensor.dims:
        return local, None, one.tensor.numel()
    dim, size = hybrid.tensor.dims[one.name]
    first = min(size, hybrid.mesh.coordinate("tensor") * local[dim])
    end = min(size, first + local[dim])
    box = tuple((first, end) if d == dim else (0, full) for d, full in enumerate(local))
    shape = tuple(size if d == dim else full for d, full in enumerate(local))
    # Padding is at the end of the first dimension, so it is at the end of the flat tensor.
    kept = one.parameter.numel() // local[dim] * (end - first)
    return shape, box, max(0, min(one.tensor.numel(), kept - one.start))


def optimizer_steps(hybrid: HybridParallel) -> int:
    """Return the number of steps that the optimizer has taken, which is equal for all parameters."""
    return int(max((state["step"].item() for state in _states(hybrid)), default=0))


def set_optimizer_steps(hybrid: HybridParallel, steps: int) -> None:
    """Set the optimizer's number of steps. With ZeRO 1 or 2, gather the parameters, loaded only in shards.

    All ranks must call it.
    """
    for state in _states(hybrid):
        state["step"].fill_(steps)
    if hybrid.sizes.zero in (1, 2):
        hybrid.data.gather_parameters()


def _states(hybrid: HybridParallel) -> Iterator[dict[str, Tensor]]:
    for one in held(hybrid):
        state = hybrid.optimizer.state[one.tensor]
        if set(state) - {"step", *STATES}:
            raise WorkbookError("A checkpoint of the hybrid training holds AdamW's state, without amsgrad.")
        yield state
