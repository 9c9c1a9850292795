"""A checkpoint of any mesh becomes one file that plain PyTorch loads."""

import os
import runpy

from safetensors.torch import load_file

from hybrid_parallel.export import export
from lab.check import state_digest
from lab.models.model import GPT, GPTConfig
from tests.hybrid_parallel.test_run import summaries
from tests.run_modes import ROOT
from tests.training.checkpoint_toys import refusal


def test_plain_pytorch_loads_what_is_exported_from_a_mesh(tmp_path, monkeypatch, capsys):
    meshes = {"shards": {"tensor": 2, "zero": 3}, "stages": {"pipeline": 2, "microbatches": 2}}
    folders = {name: tmp_path / name for name in meshes}
    runs = [
        sizes | {"layers": 2, "steps": 1, "checkpoint": str(folders[name])} for name, sizes in meshes.items()
    ]
    model = GPT(GPTConfig.named("tiny", num_layers=2))
    for (name, folder), trained in zip(folders.items(), summaries(4, runs), strict=True):
        out = tmp_path / f"{name}.safetensors"
        assert export(folder / "step-1", out) == len(model.state_dict())
        model.load_state_dict(load_file(out))
        assert state_digest(model.state_dict())[:16] == trained["replica_digest"]

    same = tmp_path / "same"
    monkeypatch.setattr("sys.argv", ["export.py", str(folder), str(same)])
    capsys.readouterr()
    runpy.run_path(str(ROOT / "hybrid_parallel" / "export.py"), run_name="__main__")
    said = f"{same} has the {len(model.state_dict())} tensors of the model in {folder}.\n"
    assert capsys.readouterr().out == said
    assert same.read_bytes() == out.read_bytes()
    missing = tmp_path / "missing" / "out.safetensors"
    assert refusal(export, folder, missing).startswith(f"cannot write {missing}: No such file or directory")
    kept = ["same", "shards", "shards.safetensors", "stages", "stages.safetensors"]
    assert sorted(os.listdir(tmp_path)) == kept, "nothing is left"


def test_a_folder_without_a_checkpoint_is_refused_in_a_sentence(tmp_path):
    out = tmp_path / "out.safetensors"
    assert refusal(export, tmp_path / "run", out) == f"there is no complete checkpoint in {tmp_path / 'run'}"
