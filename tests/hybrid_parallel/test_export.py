"""A checkpoint of any mesh becomes a file that plain PyTorch loads, and such a file becomes a checkpoint."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hybrid_parallel.export import ExportArgs, export, import_from
from hybrid_parallel.export import run as export_or_import
from lab.cluster import Cluster
from lab.models.model import GPT, GPTConfig
from lab.ranks import run_ranks
from tests.run_modes import ROOT
from tests.training.checkpoint_toys import refusal
from training.checkpoint import Checkpoints, Shard, plain_shards

CONFIG = GPTConfig(vocab_size=17, block_size=8, num_layers=2, num_heads=2, width=12)


def save_gpt(cluster: Cluster, folder: Path, config: GPTConfig) -> None:
    """Save a GPT and an optimizer state, cut into ranges."""
    shards, rank, ranks = [], cluster.rank, cluster.world_size
    for name, parameter in GPT(config, seed=5).named_parameters():
        flat = parameter.detach().reshape(-1)
        start, end = (place * len(flat) // ranks for place in (rank, rank + 1))
        for kind in ("model/", "optimizer/exp_avg/"):
            shards.append(Shard(kind + name, flat[start:end], parameter.shape, start=start))
    checkpoints = Checkpoints(folder, cluster)
    tied = {"head.weight": "token_embedding.weight"} if config.tied else {}
    checkpoints.save(4, shards, {"tied": tied})
    checkpoints.wait()


def load_gpt(cluster: Cluster, folder: Path, config: GPTConfig) -> bool:
    """Return whether the newest checkpoint has the weights of `save_gpt`, and no optimizer state."""
    checkpoints, model = Checkpoints(folder, cluster), GPT(config, seed=0)
    optimizer, step = torch.optim.AdamW(model.parameters()), checkpoints.latest()
    checkpoints.create_state(step, optimizer)
    checkpoints.load(step, plain_shards(model, optimizer))
    expected = GPT(config, seed=5).state_dict()
    return (step, dict(optimizer.state)) == (0, {}) and all(
        torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items()
    )


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_gpt_goes_from_three_ranks_to_one_file_and_back_to_two_ranks(tmp_path, is_tied):
    config = GPTConfig(**{**vars(CONFIG), "tied": is_tied})
    run_ranks(save_gpt, 3, tmp_path / "run", config)
    out = tmp_path / "gpt.safetensors"
    expected = GPT(config, seed=5).state_dict()
    for folder in (tmp_path / "run", tmp_path / "run" / "step-4"):
        assert export(folder, out) == len(expected)
    model = GPT(config, seed=0)
    model.load_state_dict(load_file(out))
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())

    assert import_from(out, tmp_path / "imported") == len(expected)
    assert run_ranks(load_gpt, 2, tmp_path / "imported", config) == [True, True]
    assert export(tmp_path / "imported", tmp_path / "again.safetensors") == len(expected)
    again = load_file(tmp_path / "again.safetensors")
    assert again.keys() == expected.keys() and all(torch.equal(again[n], expected[n]) for n in expected)


def test_the_command_says_what_it_has_done_or_why_not(tmp_path):
    file = tmp_path / "in.safetensors"
    save_file({"weight": torch.ones(2, 3)}, file)
    command = [sys.executable, str(ROOT / "hybrid_parallel" / "export.py"), str(tmp_path / "run")]

    def run(*args: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*command, *map(str, args)], capture_output=True, text=True, cwd=tmp_path)

    made = run("--from", file)
    assert made.stdout == f"{tmp_path / 'run'} has a checkpoint of step 0 with the 1 tensors in {file}.\n"
    again = run("--from", file)
    assert again.returncode == 1
    assert again.stderr == f"{tmp_path / 'run'} has the checkpoint of step 0: name another folder\n"


def test_what_cannot_be_exported_or_imported_is_said_in_a_sentence_and_nothing_is_left(tmp_path):
    run, out = tmp_path / "run", tmp_path / "out.safetensors"
    assert refusal(export, run, out) == f"there is no complete checkpoint in {run}"
    assert refusal(import_from, out, run).startswith(f"{out} cannot be read as a safetensors file: ")
    out.write_bytes(b"no such format")
    assert refusal(import_from, out, run).startswith(f"{out} cannot be read as a safetensors file: ")
    save_file({"weight": torch.ones(2, 3)}, out)
    import_from(out, run)
    assert refusal(import_from, out, run) == f"{run} has the checkpoint of step 0: name another folder"
    missing = tmp_path / "missing" / "out.safetensors"
    assert refusal(export, run, missing).startswith(f"cannot write {missing}: No such file or directory")
    assert sorted(os.listdir(tmp_path)) == ["out.safetensors", "run"]
    for args in (ExportArgs(run), ExportArgs(run, out, from_file=out)):
        assert refusal(export_or_import, args).startswith("name a file to write, or one to read")
    assert export_or_import(ExportArgs(run, out)) == f"{out} has the 1 tensors of the model in {run}."
