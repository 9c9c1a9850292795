"""A checkpoint has every element of the model and of AdamW's moments once, and every mesh can load it."""

from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from expert_parallel.config import MoEConfig
from hybrid_parallel.expert_axis import Experts
from hybrid_parallel.hybrid import HybridParallel
from hybrid_parallel.mesh import Mesh
from hybrid_parallel.sizes import ParallelSizes as Sizes
from hybrid_parallel.train_hybrid import put_on_mesh
from lab.check import assert_same
from lab.cluster import Cluster
from lab.ranks import run_ranks
from tests.hybrid_parallel.equivalence import batch, gpt
from training.checkpoint import Checkpoints, fill, read_manifest
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
    checkpoints.save(STEPS, hybrid.shards(hybrid.optimizer))
    checkpoints.wait()


def load(cluster: Cluster, folder: Path, hybrid: HybridParallel) -> None:
    checkpoints = Checkpoints(folder, cluster)
    checkpoints.load(STEPS, hybrid.shards(hybrid.optimizer))
    if hybrid.sizes.zero in (1, 2):
        hybrid.data.gather_parameters()


def saved_in(folder: Path) -> dict[str, Tensor]:
    """Return all that a checkpoint has, in full tensors."""
    found = read_manifest(folder, STEPS)
    full = {
        name: torch.empty(places[0].shape, dtype=getattr(torch, places[0].dtype))
        for name, places in found.tensors.items()
    }
    fill(found, [StateShard(name, tensor) for name, tensor in full.items()])
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
