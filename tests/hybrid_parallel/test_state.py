"""A checkpoint has every element of the model and of AdamW's moments once, and every mesh can load it."""

import os
import runpy
import tempfile
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from expert_parallel.config import MoEConfig
from hybrid_parallel.expert_axis import Experts
from hybrid_parallel.export import export
from hybrid_parallel.hybrid import HybridParallel
from hybrid_parallel.mesh import Mesh
from hybrid_parallel.sizes import ParallelSizes as Sizes
from hybrid_parallel.train_hybrid import put_on_mesh
from lab.check import assert_same, state_digest
from lab.cluster import Cluster
from lab.models.model import GPT, GPTConfig
from lab.ranks import run_ranks
from tests.hybrid_parallel.equivalence import batch, gpt
from tests.hybrid_parallel.test_run import summaries
from tests.refusals import refusal
from tests.run_modes import ROOT
from training.checkpoint import Checkpoints, fill_shards, read_manifest
from training.state_shards import StateShard

MOE = MoEConfig(4, 2)
ROWS, STEPS = 8, 2


def a_hybrid(cluster: Cluster, sizes: Sizes, moe: MoEConfig | None, seed: int = 0) -> HybridParallel:
    example = batch(ROWS // sizes.data // sizes.microbatches)[0]
    experts = None if moe is None else Experts(moe, seed=seed)
    model, mesh = gpt(seed, num_layers=2), Mesh(cluster, sizes)
    return put_on_mesh(model, mesh, example, torch.optim.AdamW, experts, lr=0.01)


def save(cluster: Cluster, folder: Path, hybrid: HybridParallel) -> None:
    checkpoints = Checkpoints(folder, cluster)
    checkpoints.save(STEPS, hybrid.state_shards(hybrid.optimizer))
    checkpoints.wait()


def load(cluster: Cluster, folder: Path, hybrid: HybridParallel) -> None:
    checkpoints = Checkpoints(folder, cluster)
    checkpoints.load(STEPS, hybrid.state_shards(hybrid.optimizer))
    if hybrid.sizes.zero in (1, 2):
        hybrid.data.gather_parameters()


def saved_in(folder: Path) -> dict[str, Tensor]:
    """Return all that a checkpoint has, in full tensors."""
    found = read_manifest(folder, STEPS)
    full = {
        name: torch.empty(places[0].shape, dtype=getattr(torch, places[0].dtype))
        for name, places in found.tensors.items()
    }
    fill_shards(found, [StateShard(name, tensor) for name, tensor in full.items()])
    return full


def check_each_loads_the_checkpoint_of_the_one_before(
    folder: Path, first: Sizes, *others: Sizes, moe: MoEConfig | None = None
) -> None:
    """Train on the first mesh, and let each of the others load the checkpoint of the one before it, and save.

    All of these checkpoints have the same elements, bit for bit: those of the model that was trained, and
    three numbers of AdamW for each of its parameters.
    """

    def trained(cluster: Cluster) -> dict[str, Tensor]:
        hybrid = a_hybrid(cluster, first, moe)
        x, y = (part.chunk(first.data)[hybrid.mesh.coordinate("data")] for part in batch(ROWS))
        for _ in range(STEPS):
            hybrid.optimizer.zero_grad()
            hybrid.backward(x, y)
            hybrid.optimizer.step()
        save(cluster, folder / "0", hybrid)
        return hybrid.full_state_dict()

    full = run_ranks(trained, first.world_size)[0]
    saved = saved_in(folder / "0")
    model = {name: tensor for name, tensor in saved.items() if not name.startswith("optimizer/")}
    assert_same({name: full[name.partition("/")[2]] for name in model}, model, 0, "tensor saved")
    once, buffers = full.keys() - {"head.weight"}, {name for name in full if name.endswith("bias_E")}  # tied
    assert {name.partition("/")[2] for name in model} == once
    assert len(saved) == len(once) + 3 * len(once - buffers)

    def handed_on(cluster: Cluster, sizes: Sizes, before: Path, after: Path) -> None:
        hybrid = a_hybrid(cluster, sizes, moe, seed=1)  # of other weights, so all must be loaded
        other_weights = {name: tensor + 1 for name, tensor in hybrid.full_state_dict().items()}
        hybrid.load_full_state_dict(other_weights)
        assert_same(hybrid.full_state_dict(), other_weights, 0, f"parameter of a full state on {sizes}")
        load(cluster, before, hybrid)
        loaded = {name: tensor for name, tensor in hybrid.full_state_dict().items() if name in once}
        assert_same(loaded, {name: full[name] for name in once}, 0, f"parameter loaded on {sizes}")
        save(cluster, after, hybrid)

    for number, (before, sizes) in enumerate(pairwise((first, *others)), start=1):
        folders = folder / str(number - 1), folder / str(number)
        run_ranks(handed_on, sizes.world_size, sizes, *folders)
        assert_same(saved_in(folders[1]), saved, 0, f"element saved on {sizes}, loaded from {before}")


def test_a_checkpoint_of_divided_experts_loads_on_other_meshes(tmp_path):
    check_each_loads_the_checkpoint_of_the_one_before(
        tmp_path,
        Sizes(data=2, expert_ranks=2),
        Sizes(data=2, zero=3),
        Sizes(data=2, tensor=2, expert_ranks=2),
        Sizes(pipeline=2, data=2, expert_ranks=2, microbatches=2),
        moe=MOE,
    )


def test_a_checkpoint_of_cut_sequences_loads_on_other_meshes_and_theirs_where_sequences_are_cut(tmp_path):
    check_each_loads_the_checkpoint_of_the_one_before(
        tmp_path,
        Sizes(data=2, context=2, zero=1),
        Sizes(context=2, tensor=2, sequence_parallel=True, zero=2),
        Sizes(pipeline=2, data=2, zero=1, microbatches=2),
        Sizes(context=3, zero=3),
    )


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


def test_a_resumed_run_on_another_mesh_goes_on_where_the_first_one_was():
    stages, shards = {"pipeline": 2, "microbatches": 2}, {"tensor": 2}
    [alone] = summaries(1, [{"model": "mlp", "steps": 4}])
    with tempfile.TemporaryDirectory() as folder:
        run = {"model": "mlp", "checkpoint": folder}
        first = run | stages | {"steps": 2}
        _, going_on = summaries(2, [first, run | shards | {"steps": 4, "resume": True}])
    for what in ("last_loss", "validation_loss"):
        assert going_on[what] == pytest.approx(alone[what], rel=1e-5)
