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
from lab.check import assert_same
from lab.cluster import Cluster
from lab.models.model import GPT, loss_of
from lab.ranks import run_ranks
from tests.hybrid_parallel.equivalence import RTOL, batch, gpt
from tests.hybrid_parallel.plain_experts import auxiliary_loss, with_plain_experts
from training.checkpoint import Checkpoints, Shard, fill, read_manifest

MOE = Experts(MoEConfig(4, 2), aux_weight=0.3, seed=7)
ROWS, STEPS = 8, 3
KINDS = ("model", "optimizer/exp_avg", "optimizer/exp_avg_sq", "optimizer/step")


def a_hybrid(cluster: Cluster, sizes: Sizes, experts: Experts | None, seed: int = 0) -> HybridParallel:
    example = batch(ROWS // sizes.data // sizes.microbatches)[0]
    mesh = Mesh(cluster, sizes)
    return HybridParallel(gpt(seed, num_layers=2), mesh, example, torch.optim.AdamW, experts, lr=0.01)


def train(hybrid: HybridParallel) -> None:
    own = hybrid.mesh.coordinate("data")
    x, y = (part.chunk(hybrid.sizes.data)[own] for part in batch(ROWS))
    for _ in range(STEPS):
        hybrid.optimizer.zero_grad()
        hybrid.backward(x, y)
        hybrid.optimizer.step()


def save(cluster: Cluster, folder: Path, hybrid: HybridParallel) -> None:
    checkpoints = Checkpoints(folder, cluster)
    checkpoints.save(STEPS, hybrid.shards(hybrid.optimizer))
    checkpoints.wait()


def load(cluster: Cluster, folder: Path, hybrid: HybridParallel) -> None:
    checkpoints = Checkpoints(folder, cluster)
    checkpoints.create_state(STEPS, hybrid.optimizer)
    checkpoints.load(STEPS, hybrid.shards(hybrid.optimizer))
    if hybrid.sizes.zero in (1, 2):
        hybrid.data.gather_parameters()


def saved_in(folder: Path) -> dict[str, Tensor]:
    """Return all that a checkpoint has, in full tensors."""
    found = read_manifest(folder, STEPS)
    full = {
        name: torch.empty(saved.size, dtype=saved.properties.dtype) for name, saved in found.tensors.items()
    }
    fill(found, [Shard(name, tensor) for name, tensor in full.items()])
    return full


def of_one_process(model: GPT, aux_weight: float) -> dict[str, Tensor]:
    """Return what a checkpoint should have after a plain model was trained, each parameter once."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    x, y = batch(ROWS)
    for _ in range(STEPS):
        optimizer.zero_grad()
        (loss_of(model(x), y) + aux_weight * auxiliary_loss(model)).backward()
        optimizer.step()
    found = {f"model/{name}": parameter.detach() for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        found |= {f"optimizer/{kind}/{name}": value for kind, value in optimizer.state[parameter].items()}
    return found


def of_kind(kind: str, every: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in every.items() if name.startswith(f"{kind}/")}


def beside_noise(kind: str, every: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors without the keys' biases, whose gradient is only rounding, which AdamW scales up."""
    return {name: tensor for name, tensor in of_kind(kind, every).items() if "k_proj.bias" not in name}


def check_each_loads_the_checkpoint_of_the_one_before(
    folder: Path, first: Sizes, *others: Sizes, experts: Experts | None = None
) -> None:
    """Train on the first mesh, and let each of the others load the checkpoint of the one before it, and save.

    All of these checkpoints have the same elements, bit for bit. So it does not matter which of them a mesh
    loads. The first one is compared with one process, in float64.
    """

    def trained(cluster: Cluster) -> dict[str, Tensor]:
        hybrid = a_hybrid(cluster, first, experts)
        initial = hybrid.full_state_dict()
        train(hybrid)
        save(cluster, folder / "0", hybrid)
        return initial

    initial, *_ = run_ranks(trained, first.world_size)
    model = gpt(num_layers=2)
    if experts is not None:
        model = with_plain_experts(model, experts.moe, num_ranks=1)
    model.load_state_dict(initial)
    saved, expected = saved_in(folder / "0"), of_one_process(model, experts.aux_weight if experts else 0.0)
    assert saved.keys() == expected.keys()
    for kind in KINDS:
        ours, theirs = beside_noise(kind, saved), beside_noise(kind, expected)
        assert_same(ours, theirs, RTOL, f"{kind} of {first}")

    def handed_on(cluster: Cluster, sizes: Sizes, before: Path, after: Path) -> None:
        other = None if experts is None else Experts(experts.moe, experts.aux_weight, seed=8)
        hybrid = a_hybrid(cluster, sizes, other, seed=1)  # of other weights, so all must be loaded
        other_weights = {name: tensor + 1 for name, tensor in hybrid.full_state_dict().items()}
        hybrid.load_full_state_dict(other_weights)
        assert_same(hybrid.full_state_dict(), other_weights, 0, f"parameter of a full state on {sizes}")
        load(cluster, before, hybrid)
        full = {f"model/{name}": tensor for name, tensor in hybrid.full_state_dict().items()}
        loaded = {name: tensor for name, tensor in full.items() if name in saved}
        assert_same(loaded, of_kind("model", saved), 0, f"parameter loaded on {sizes}")
        save(cluster, after, hybrid)

    for number, (before, sizes) in enumerate(pairwise((first, *others)), start=1):
        folders = folder / str(number - 1), folder / str(number)
        run_ranks(handed_on, sizes.world_size, sizes, *folders)
        assert_same(saved_in(folders[1]), saved, 0, f"element saved on {sizes}, loaded from {before}")


def test_a_checkpoint_of_divided_experts_loads_on_other_meshes(tmp_path):
    check_each_loads_the_checkpoint_of_the_one_before(
        tmp_path,
        Sizes(data=2, expert_ranks=2),
        Sizes(),
        Sizes(data=4, expert_ranks=4),
        Sizes(data=2, zero=1),
        Sizes(data=2, context=2, expert_ranks=2),
        Sizes(data=2, zero=3),
        Sizes(data=2, tensor=2, expert_ranks=2),
        Sizes(pipeline=2, data=2, expert_ranks=2, microbatches=2),
        Sizes(data=2, expert_ranks=2),
        experts=MOE,
    )


def test_a_checkpoint_of_cut_sequences_loads_on_other_meshes_and_theirs_where_sequences_are_cut(tmp_path):
    check_each_loads_the_checkpoint_of_the_one_before(
        tmp_path,
        Sizes(data=2, context=2, zero=1),
        Sizes(),
        Sizes(context=2, attention="all_to_all"),
        Sizes(data=2, zero=3),
        Sizes(context=2, tensor=2, sequence_parallel=True, zero=2),
        Sizes(pipeline=2, microbatches=2),
        Sizes(pipeline=2, data=2, zero=1, microbatches=2),
        Sizes(tensor=4),
        Sizes(context=3, zero=3),
    )
