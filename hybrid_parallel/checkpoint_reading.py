"""Read from a checkpoint what one rank wants: only the blocks with its elements, and check each of them.

      saved by rank 0    | block 0 | block 1 | block 2 |      wanted: block 1 of rank 0 and block 0 of rank 1
      saved by rank 1    | block 0 | block 1 | ...            are read and checked, the others are not

checkpoint_pieces.py finds where each wanted element is.
"""

import functools
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hybrid_parallel.checkpoint_folder import WAY_OUT, Manifest, SavedPart
from hybrid_parallel.checkpoint_pieces import Piece
from lab.launch.errors import WorkbookError


def fill(folder: Path, manifest: Manifest, wanted: Sequence[Piece]) -> None:
    """Fill the wanted pieces, which `refuse_other_tensors` has accepted.

    Raise WorkbookError if a block is not as it was saved, or if elements are missing or saved twice.
    """
    by_name, lines = manifest.by_name(), manifest.lines()
    opened = functools.cache(functools.partial(safe_open, framework="pt"))  # each file once
    for piece in wanted:
        name = manifest.saved_name(piece.name)
        parts: dict[int, CheckedPart] = {}
        flat = torch.empty(piece.tensor.numel(), dtype=piece.tensor.dtype)
        for copy in lines[name].copies(piece.part):
            if copy.source not in parts:
                saved = by_name[name][copy.source]
                path = folder / manifest.files[saved.rank]
                parts[copy.source] = CheckedPart(path, saved, manifest.block, opened)
            parts[copy.source].copy(copy.begin, flat[copy.to : copy.to + copy.numel])
        piece.tensor.detach().copy_(flat.view(piece.tensor.shape))


def refuse_other_tensors(manifest: Manifest, wanted: Sequence[Piece], folder: Path) -> list[str]:
    """Return the names under which the wanted tensors are saved.

    Raise WorkbookError if one is missing, or has another shape or dtype.
    """
    by_name, names = manifest.by_name(), []
    for piece in wanted:
        name = manifest.saved_name(piece.name)
        if name not in by_name:
            raise WorkbookError(f"{folder} is of another model: it has no {name}")
        saved = by_name[name][0]
        here = (tuple(piece.shape), str(piece.tensor.dtype).removeprefix("torch."))
        if here != (saved.part.shape, saved.dtype):
            raise WorkbookError(
                f"{folder} is of another model: {name} has shape {saved.part.shape} and dtype {saved.dtype} "
                f"in it, and shape {here[0]} and dtype {here[1]} in this run"
            )
        names.append(name)
    return names


class CheckedPart:
    """Read elements of a saved part, block by block. Raise WorkbookError if a block has changed."""

    def __init__(self, path: Path, saved: SavedPart, block: int, opened: Callable[[Path], Any]) -> None:
        self._path, self._saved = path, saved
        self._block_numel = block // saved.torch_dtype.itemsize
        self._number, self._block = -1, torch.empty(0)
        try:
            self._slice = opened(path).get_slice(str(saved.part))
            if self._slice.get_shape() != [saved.part.numel]:
                raise self._damaged()
        except FileNotFoundError:
            raise self._error("is missing") from None
        except (SafetensorError, OSError) as error:
            raise self._damaged() from error

    def copy(self, begin: int, target: Tensor) -> None:
        """Fill `target` with the elements from `begin` on."""
        done = 0
        while done < len(target):
            number, first = divmod(begin + done, self._block_numel)
            source = self._read(number)[first : first + len(target) - done]
            target[done : done + len(source)] = source
            done += len(source)

    def _read(self, number: int) -> Tensor:
        if number != self._number:
            begin = number * self._block_numel
            block = self._slice[begin : min(begin + self._block_numel, self._saved.part.numel)]
            if block.dtype != self._saved.torch_dtype:
                raise self._damaged()
            if zlib.crc32(block.view(torch.uint8).numpy().data) != self._saved.checksums[number]:
                raise self._damaged()
            self._number, self._block = number, block
        return self._block

    def _damaged(self) -> WorkbookError:
        return self._error(f"is damaged: rank {self._saved.rank} saved other numbers as {self._saved.part}")

    def _error(self, what: str) -> WorkbookError:
        return WorkbookError(f"{self._path} {what}; {WAY_OUT.format(self._path.parent)}")
