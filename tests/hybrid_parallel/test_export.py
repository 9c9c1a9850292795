"""A checkpoint of any mesh becomes one file that plain PyTorch loads."""

import os
import subprocess
import sys

import pytest
from safetensors.torch import load_file

from hybrid_parallel.export import export
from lab.check import state_digest
from lab.models.model import GPT, GPTConfig
from tests.hybrid_parallel.test_run import summaries
from tests.run_modes import ROOT
from tests.training.checkpoint_toys import refusal


@pytest.mark.parametrize("sizes", [{"tensor": 2, "zero": 3}, {"pipeline": 2, "microbatches": 2}], ids=str)
def test_plain_pytorch_loads_what_is_exported_from_a_mesh(tmp_path, sizes):
    run, out = tmp_path / "run", tmp_path / "gpt.safetensors"
    [trained] = summaries(4, [sizes | {"steps": 2, "checkpoint": str(run)}])
    command = [sys.executable, str(ROOT / "hybrid_parallel" / "export.py"), str(run), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    model = GPT(GPTConfig.named("tiny", num_layers=4))
    assert done.stdout == f"{out} has the {len(model.state_dict())} tensors of the model in {run}.\n"
    model.load_state_dict(load_file(out))
    assert state_digest(model.state_dict())[:16] == trained["replica_digest"]

    assert export(run / "step-2", tmp_path / "same") == len(model.state_dict())
    assert (tmp_path / "same").read_bytes() == out.read_bytes()
    missing = tmp_path / "missing" / "out.safetensors"
    assert refusal(export, run, missing).startswith(f"cannot write {missing}: No such file or directory")
    assert sorted(os.listdir(tmp_path)) == ["gpt.safetensors", "run", "same"], "nothing is left"


def test_a_folder_without_a_checkpoint_is_refused_in_a_sentence(tmp_path):
    out = tmp_path / "out.safetensors"
    assert refusal(export, tmp_path / "run", out) == f"there is no complete checkpoint in {tmp_path / 'run'}"
    command = [sys.executable, str(ROOT / "hybrid_parallel" / "export.py"), str(tmp_path), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (1, f"there is no complete checkpoint in {tmp_path}\n")
