"""Write the model of a checkpoint as one safetensors file, or make a checkpoint of such a file.

      runs/first/step-120/  ── export.py runs/first gpt.safetensors ─────────►  one file: full tensors
         of any mesh        ◄─ export.py runs/second --from gpt.safetensors ──  by the model's names

    python hybrid_parallel/export.py runs/first gpt.safetensors              # the newest checkpoint
    python hybrid_parallel/export.py runs/first/step-100 gpt.safetensors

    model = GPT(config)
    model.load_state_dict(safetensors.torch.load_file("gpt.safetensors"))

The checkpoint made from a file has step 0, and no optimizer state. Both need memory for the full model.
"""

import os
import re
import secrets
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import tyro
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from lab.launch.errors import WorkbookError, reason
from training import checkpoint
from training.checkpoint import Shard, fill

MODEL = "model/"  # what the names of a model's tensors begin with in a checkpoint


@dataclass
class ExportArgs:
    """Write the model of a checkpoint as one safetensors file, or make a checkpoint of such a file."""

    checkpoint: tyro.conf.Positional[Path]
    """Folder with checkpoints (the newest counts), or one checkpoint in it, such as runs/first/step-100."""
    out: tyro.conf.Positional[Path | None] = None
    """File to write."""
    from_file: Annotated[Path | None, tyro.conf.arg(name="from")] = None
    """File to read instead: the folder gets a checkpoint of its tensors."""


def export(folder: Path, out: Path) -> int:
    """Write the model of a checkpoint to the file `out`, and return the number of its tensors.

    Raise WorkbookError if there is no checkpoint, it is damaged, or `out` cannot be written.
    """
    found = checkpoint.read_manifest(*_find(folder))
    full = {
        name.removeprefix(MODEL): torch.empty(saved.size, dtype=saved.properties.dtype)
        for name, saved in found.tensors.items()
        if name.startswith(MODEL)
    }
    fill(found, [Shard(MODEL + name, tensor) for name, tensor in full.items()])
    # A plain model has a tied tensor under each of its names; the format takes no tensor twice.
    tied = found.extra["tied"]
    full |= {name: full[first].clone() for name, first in tied.items() if first in full}
    partial = out.with_name(f"{out.name}.partial-{secrets.token_hex(4)}")
    try:
        save_file(full, partial)
        with partial.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(partial, out)
    except (OSError, SafetensorError) as error:
        raise WorkbookError(f"cannot write {out}: {_disk_reason(error)}") from error
    finally:
        partial.unlink(missing_ok=True)
    return len(full)


def import_from(file: Path, directory: Path) -> int:
    """Save the tensors of a safetensors file as the checkpoint of step 0, and return their number.

    Two names of equal matrices count as tied, and are saved once. Raise WorkbookError if the file cannot be
    read, or the folder cannot be written or has checkpoints.
    """
    try:
        tensors = load_file(file)
    except (OSError, SafetensorError) as error:
        raise WorkbookError(f"{file} cannot be read as a safetensors file: {reason(error)}") from error
    if steps := checkpoint.complete_steps(directory):
        raise WorkbookError(f"{directory} has the checkpoint of step {steps[-1]}: name another folder")
    tied = _tied(tensors)
    names = tensors.keys() - tied.keys()
    boxes = [
        box for name in names for box in Shard(MODEL + name, tensors[name]).boxes(tensors[name].view(-1))
    ]
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WorkbookError(f"cannot save a checkpoint in {directory}: {reason(error)}") from error
    extra = {"tied": tied}
    checkpoint.write(checkpoint.folder_of(directory, 0), secrets.token_hex(4), boxes, extra, None)
    return len(tensors)


def _disk_reason(error: Exception) -> str:
    """Return the reason why a file could not be written; safetensors puts the system's into its own text."""
    found = re.search(r"I/O error: (.+?) \(os error \d+\)", str(error))
    return found[1] if found else reason(error)


def _tied(tensors: dict[str, Tensor]) -> dict[str, str]:
    """Return for each matrix that equals an earlier one the name of that one; a GPT's head is the last."""
    first: dict[tuple[object, ...], list[str]] = {}
    tied = {}
    for name, tensor in sorted(tensors.items(), key=lambda item: item[0] == "head.weight"):
        alike = first.setdefault((tensor.shape, tensor.dtype), [])
        equal = [other for other in alike if tensor.dim() > 1 and torch.equal(tensors[other], tensor)]
        if equal:
            tied[name] = equal[0]
        else:
            alike.append(name)
    return tied


def _find(folder: Path) -> tuple[Path, int]:
    """Return the folder of all checkpoints and a step, for that folder or for one checkpoint in it."""
    if match := checkpoint.STEP.fullmatch(folder.name):
        return folder.parent, int(match[1])
    steps = checkpoint.complete_steps(folder)
    if not steps:
        raise WorkbookError(f"there is no complete checkpoint in {folder}")
    return folder, steps[-1]


def run(args: ExportArgs) -> str:
    """Do what the command line asks for, and return a line that says what was done."""
    if (args.out is None) == (args.from_file is None):
        raise WorkbookError("name a file to write, or one to read after --from")
    if args.out is not None:
        number = export(args.checkpoint, args.out)
        return f"{args.out} has the {number} tensors of the model in {args.checkpoint}."
    assert args.from_file is not None
    number = import_from(args.from_file, args.checkpoint)
    return f"{args.checkpoint} has a checkpoint of step 0 with the {number} tensors in {args.from_file}."


def main() -> None:
    try:
        print(run(tyro.cli(ExportArgs)))
    except WorkbookError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
