"""Write the model of a checkpoint as one safetensors file.

      runs/first/step-120/  ── export.py runs/first gpt.safetensors ──►  one file: full tensors
         of any mesh                                                     by the model's names

    python hybrid_parallel/export.py runs/first gpt.safetensors              # the newest checkpoint
    python hybrid_parallel/export.py runs/first/step-100 gpt.safetensors

    model = GPT(config)
    model.load_state_dict(safetensors.torch.load_file("gpt.safetensors"))

It needs memory for twice the full model.
"""

import sys
from pathlib import Path

import torch
import tyro
from safetensors.torch import save

from lab.launch.errors import WorkbookError, reason
from training.checkpoint import STEP, complete_steps, fill_shards, read_manifest
from training.state_shards import StateShard


def export(folder: Path, out: Path) -> int:
    """Write a checkpoint's model to the file `out`; return its number of tensors, or raise WorkbookError."""
    found = read_manifest(*_find(folder))
    shards = [
        StateShard(name, torch.empty(places[0].shape, dtype=getattr(torch, places[0].dtype)))
        for name, places in found.tensors.items()
        if not name.startswith("optimizer/")
    ]
    fill_shards(found, shards)
    full = {shard.name.partition("/")[2]: shard.tensor for shard in shards}
    # A plain model has a tied tensor under each of its names; the format takes no tensor twice.
    tied = found.extra["tied"]
    full |= {name: full[first].clone() for name, first in tied.items() if first in full}
    try:
        out.write_bytes(save(full))
    except OSError as error:
        raise WorkbookError(f"cannot write {out}: {reason(error)}") from error
    return len(full)


def _find(folder: Path) -> tuple[Path, int]:
    """Return the folder of all checkpoints and a step, for that folder or for one checkpoint in it."""
    if match := STEP.fullmatch(folder.name):
        return folder.parent, int(match[1])
    steps = complete_steps(folder)
    if not steps:
        raise WorkbookError(f"there is no complete checkpoint in {folder}")
    return folder, steps[-1]


def main(checkpoint: tyro.conf.Positional[Path], out: tyro.conf.Positional[Path]) -> None:
    """Write the model of a checkpoint as one safetensors file.

    Args:
        checkpoint: Folder with checkpoints (the newest counts), or one of them, such as runs/first/step-100.
        out: File to write.
    """
    try:
        print(f"{out} has the {export(checkpoint, out)} tensors of the model in {checkpoint}.")
    except WorkbookError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    tyro.cli(main)
