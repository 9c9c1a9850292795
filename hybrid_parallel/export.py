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

from hybrid_parallel import checkpoint_folder as files
from hybrid_parallel.checkpoint_pieces import Part, Piece
from hybrid_parallel.checkpoint_reading import fill
from lab.launch.errors import WorkbookError, reason

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
    directory, step = _find(folder)
    manifest = files.read_manifest(directory, step)
    full = {
        name: torch.empty(saved[0].part.shape, dtype=saved[0].torch_dtype)
        for name, saved in manifest.by_name().items()
        if name.startswith(MODEL)
    }
    fill(files.folder_of(directory, step), manifest, [Piece(n, t, tuple(t.shape)) for n, t in full.items()])
    # A plain model has a tied tensor under each of its names; the format takes no tensor twice.
    full |= {name: full[first].clone() for name, first in manifest.tied.items() if first in full}
    partial = out.with_name(f"{out.name}.partial-{secrets.token_hex(4)}")
    try:
        with files.as_os_error():
            save_file({name.removeprefix(MODEL): tensor for name, tensor in full.items()}, partial)
        files.sync(partial)
        os.replace(partial, out)
    except OSError as error:
        raise WorkbookError(f"cannot write {out}: {reason(error)}") from error
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
    tied = _tied(tensors)
    parts = {
        Piece(MODEL + name, tensor, tuple(tensor.shape)).part: tensor.reshape(-1)
        for name, tensor in tensors.items()
        if name not in tied
    }
    try:
        _save(directory, parts, {MODEL + name: MODEL + first for name, first in tied.items()})
    except OSError as error:
        raise WorkbookError(f"cannot save a checkpoint in {directory}: {reason(error)}") from error
    return len(tensors)


def _save(directory: Path, tensors: dict[Part, Tensor], tied: dict[str, str]) -> None:
    files.refuse_other_formats(directory)
    directory.mkdir(parents=True, exist_ok=True)
    if steps := files.complete_steps(directory):
        raise WorkbookError(f"{directory} has the checkpoint of step {steps[-1]}: name another folder")
    token = secrets.token_hex(4)
    files.write_rank(directory, 0, 0, token, tensors)
    parts = [files.as_json(saved) for saved in files.describe(0, tensors)]
    word = {"parts": parts, "extra": {"step": 0}, "tied": tied}
    files.publish(directory, files.manifest_of(0, token, [word]))


def _tied(tensors: dict[str, Tensor]) -> dict[str, str]:
    """Return for each matrix that equals an earlier one the name of that one."""
    first: dict[tuple[object, ...], list[str]] = {}
    tied = {}
    for name, tensor in tensors.items():
        alike = first.setdefault((tensor.shape, tensor.dtype), [])
        equal = [other for other in alike if tensor.dim() > 1 and torch.equal(tensors[other], tensor)]
        if equal:
            tied[name] = equal[0]
        else:
            alike.append(name)
    return tied


def _find(folder: Path) -> tuple[Path, int]:
    """Return the folder of all checkpoints and a step, for that folder or for one checkpoint in it."""
    if match := files.STEP.fullmatch(folder.name):
        return folder.parent, int(match[1])
    files.refuse_other_formats(folder)
    steps = files.complete_steps(folder)
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
