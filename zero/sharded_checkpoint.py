"""Save a run of any stage of ZeRO, and resume it with another stage, layout or number of ranks.

      rank 0    weight 0..5     exp_avg 0..5     ┐                ┌  weight 0..3     exp_avg 0..3    rank 0
      rank 1    weight 6..9     exp_avg 6..9     ├── directory ───┤  weight 4..7     exp_avg 4..7    rank 1
                bias   0..1     exp_avg 0..1     ┘                └  weight 8..9, bias 0..1  ...     rank 2

In any layout of the buckets, a rank owns a set of pieces. A piece is a parameter's name, and a range of its
elements. An elementwise optimizer's state has the same ranges. Padding belongs to a layout and is not saved.
What is equal on all ranks (the optimizer's `step`, buffers, frozen parameters) is written once. PyTorch's own
fully_shard cuts each parameter between its rows: those are ranges, too. training.range_checkpoint describes
the files, and why a kill at any moment loses nothing.

ByteCheckpoint does the same for the shapes of FSDP and tensor parallelism: https://arxiv.org/abs/2407.20143.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from data_parallel.flat import Piece
from lab.checkpoint import refusing_misfits
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.ranges import Items, Range
from training import range_checkpoint
from training.range_checkpoint import Found


class ShardedState(NamedTuple):
    """The state that a rank owns, for training.checkpoint. `gather`, if given, is called after loading.

    Stages 1 and 2 of ZeRO gather full parameters from the pieces then.
    """

    pieces: dict[str, Piece]
    rest: dict[str, Tensor]
    optimizer: Optimizer
    gather: Callable[[], None] | None = None

    def save(self, cluster: Cluster, folder: str, header: dict[str, Any]) -> None:
        """Write the pieces of all ranks and `header`."""
        save(cluster, folder, self.pieces, self.optimizer, header, self.rest)

    def load(self, cluster: Cluster, folder: str, validate: Callable[[dict[str, Any]], None]) -> None:
        """Fill the pieces and the optimizer's state, unless `validate` refuses the header."""
        header = load(cluster, folder, self.pieces, self.optimizer, self.rest)
        with refusing_misfits(folder):
            validate(header)
        if self.gather is not None:
            self.gather()


def save(
    cluster: Cluster,
    directory: str,
    pieces: dict[str, Piece],
    optimizer: Optimizer,
    extra: dict[str, Any],
    rest: dict[str, Tensor] | None = None,
) -> None:
    """Write the pieces of all ranks, the state that `optimizer` has of them, `rest` and `extra`.

    All ranks call it; several machines need a file system that they share. `optimizer` is one over the
    pieces' tensors. `rest` is equal on all ranks; `extra` is plain numbers and strings, in lists and dicts.
    Returns when all is on disk. Raises WorkbookError on all ranks if one has failed; the older checkpoint
    stays.
    """
    states = {name: _state(optimizer, piece) for name, piece in pieces.items()}
    header = {
        "extra": extra,
        "shapes": _shapes(pieces, rest or {}),
        "optimizer": _kind(pieces, optimizer),
        "options": [_options(group) for group in optimizer.param_groups],
        "numbers": {name: _numbers(state) for name, state in states.items()},
    }
    range_checkpoint.save(cluster, Path(directory), _items(pieces, states, _flat(rest or {})), header)


def load(
    cluster: Cluster,
    directory: str,
    pieces: dict[str, Piece],
    optimizer: Optimizer,
    rest: dict[str, Tensor] | None = None,
) -> dict[str, Any]:
    """Fill the pieces and `rest`, give the optimizer its state and hyperparameters; returns `extra`.

    All ranks call it. Only the pieces are filled: gather the parameters from them afterwards. Raises
    WorkbookError on all ranks if there is no complete checkpoint, or it does not fit the model or optimizer.
    """

    def refuse_unless_fitting(found: Found) -> None:
        here, saved = _shapes(pieces, rest or {}), found.header["shapes"]
        for name in {**saved, **here}:
            if here.get(name) != saved.get(name):
                there, ours = (f"has shape {s[name]}" if name in s else "is missing" for s in (saved, here))
                raise WorkbookError(
                    f"{found.folder} is of another model: {name} {there} in it, and {ours} in this one"
                )
        if _kind(pieces, optimizer) != found.header["optimizer"]:
            raise WorkbookError(f"{found.folder} is of another optimizer, or has other groups of parameters")

    found = range_checkpoint.find(cluster, Path(directory), refuse_unless_fitting)
    with refusing_misfits(found.folder):
        states = {name: dict(found.header["numbers"].get(name, {})) for name in pieces}
        for key, saved in found.tensors.items():
            if key.startswith("optimizer/"):
                _, kind, name = key.split("/", 2)
                tensor = pieces[name].tensor
                if saved.size:
                    states[name][kind] = torch.empty_like(tensor, dtype=saved.properties.dtype)
                else:
                    states[name][kind] = torch.empty((), dtype=saved.properties.dtype)
    flat_rest = _flat(rest or {})
    range_checkpoint.read(found, _items(pieces, states, flat_rest))
    for name, whole in (rest or {}).items():
        # If `whole` is not contiguous, `_flat` has made a copy of it.
        whole.detach().copy_(flat_rest[name].view_as(whole))

    tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    number = {tensor: i for i, tensor in enumerate(tensors)}
    state = {}
    for name, piece in pieces.items():
        # Adagrad has a state of frozen parameters, too, which was not saved.
        known = states[name] if piece.tensor.requires_grad else optimizer.state.get(piece.tensor)
        if known:
            state[number[piece.tensor]] = known
    with refusing_misfits(found.folder):
        groups = [
            {**options, "params": [number[tensor] for tensor in group["params"]]}
            for group, options in zip(optimizer.param_groups, found.header["options"], strict=True)
        ]
        # torch's method moves what must be elsewhere: `step` may be on the CPU, or where the parameter is.
        # The other entries of a state dict, such as `shard`, say whose it is: they stay this optimizer's.
        optimizer.load_state_dict(optimizer.state_dict() | {"state": state, "param_groups": groups})
        return found.header["extra"]


def pieces_of_dtensors(model: nn.Module) -> dict[str, Piece]:
    """Return what this rank has of a model's parameters, by name, after PyTorch's fully_shard."""
    pieces = {}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        rows, row = parameter.shape[0], parameter.shape[1:].numel()
        each = -(-rows // parameter.device_mesh.size())
        first = min(rows, each * parameter.device_mesh.get_local_rank())
        pieces[name] = Piece(parameter, first * row, parameter)
    return pieces


def _state(optimizer: Optimizer, piece: Piece) -> dict[str, Any]:
    """Return the optimizer's state of a piece; of a frozen one, which other stages do not have, nothing."""
    return dict(optimizer.state.get(piece.tensor, {})) if piece.tensor.requires_grad else {}


def _mine(tensor: Tensor) -> Tensor:
    """Return this rank's part of a piece, or of its state, flat."""
    part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return part.detach().reshape(-1)


def _flat(rest: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().reshape(-1) for name, tensor in rest.items()}


def _items(
    pieces: dict[str, Piece], states: dict[str, dict[str, Any]], flat_rest: dict[str, Tensor]
) -> Items:
    """Return this rank's share of what is saved, under the same names on all ranks.

    The rest has names and ranges like parameters, because a frozen parameter is in the rest in stages 1 and
    2, and in the pieces in stage 3.
    """
    items: Items = {f"model/{name}": Range(flat, 0, flat.numel()) for name, flat in flat_rest.items()}
    for name, piece in pieces.items():
        numel = piece.parameter.shape.numel()
        items[f"model/{name}"] = Range(_mine(piece.tensor), piece.start, numel)
        for kind, value in states[name].items():
            if isinstance(value, Tensor):
                key = f"optimizer/{kind}/{name}"
                items[key] = Range(_mine(value), piece.start, numel) if value.dim() else value
    return items


def _shapes(pieces: dict[str, Piece], rest: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    shapes = {name: tuple(piece.parameter.shape) for name, piece in pieces.items()}
    return shapes | {name: tuple(tensor.shape) for name, tensor in rest.items()}


def _kind(pieces: dict[str, Piece], optimizer: Optimizer) -> dict[str, Any]:
    """Return what optimizers that take each other's state have in common: hyperparameters and groups."""
    names = {piece.tensor: name for name, piece in pieces.items()}
    groups = [
        sorted(names[tensor] for tensor in group["params"] if tensor.requires_grad)
        for group in optimizer.param_groups
    ]
    return {"hyperparameters": sorted(optimizer.defaults), "groups": groups}


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _numbers(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in state.items() if not isinstance(value, Tensor)}
