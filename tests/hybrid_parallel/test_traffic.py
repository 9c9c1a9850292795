"""The bytes that each axis of a mesh sends: as the ledger counts them, and by formula."""

from dataclasses import replace

import pytest
import torch

from comm.collectives import all_reduce
from comm.point_to_point import recv, send
from hybrid_parallel.hybrid import HybridParallel
from hybrid_parallel.mesh import Mesh
from hybrid_parallel.report import counted_by_axis, drawn_traffic
from hybrid_parallel.sizes import ParallelSizes
from hybrid_parallel.traffic import AXES, traffic_of_axes
from hybrid_parallel.train_hybrid import put_on_mesh
from lab.cluster import Cluster
from lab.ranks import run_ranks
from lab.trace.ledger import LEDGER
from tests.hybrid_parallel.equivalence import batch, counting, gpt
from tests.on_ranks import on_ranks


@on_ranks(4)
def test_each_message_counts_for_the_axis_along_which_it_travels(cluster: Cluster):
    for pattern in ("pipelined_ring", "tree", "torch"):
        all_reduce(torch.ones(3), pattern=pattern)  # connects all ranks, before the group gets a name
    square = Mesh(cluster, ParallelSizes(pipeline=2, tensor=2))
    groups = {"pipeline": square.pipeline, "tensor": square.tensor}
    cut = Mesh(cluster, ParallelSizes(data=2, context=2, expert_ranks=2))
    groups |= {"data": cut.data, "context": cut.context, "expert": cut.form_expert_groups().experts}
    # Ranks that average gradients, all of them or those of an expert, communicate along the data axis.
    along = [*groups.items(), ("data", cut.replicas), ("data", cut.form_expert_groups().replicas)]
    assert {axis for axis, _ in along} == set(AXES)
    for axis, group in along:
        for pattern in ("pipelined_ring", "tree", "torch"):
            LEDGER.clear()
            all_reduce(torch.ones(3), group=group, pattern=pattern)
            axes = {entry.axis for entry in LEDGER.rows()}
            assert axes == {axis}, f"messages of {pattern} along {axis} count for another axis: {axes}"
    LEDGER.clear()
    send(torch.ones(1), 1, square.pipeline) if cluster.rank < 2 else recv(torch.ones(1), 0, square.pipeline)
    assert {entry.axis for entry in LEDGER.rows()} <= {"pipeline"}


def a_hybrid(cluster: Cluster, sizes: ParallelSizes) -> HybridParallel:
    example = batch(2)[0]
    return put_on_mesh(gpt().float(), Mesh(cluster, sizes), example, torch.optim.SGD, lr=0.1)


PATTERNS = [
    ParallelSizes(data=2, zero=1, pattern="torch"),
    ParallelSizes(tensor=2, pattern="auto"),
    ParallelSizes(data=2, zero=3, recompute=True, pattern="tree"),
    ParallelSizes(tensor=2, precision="bf16", sequence_parallel=True, recompute=True),
    ParallelSizes(pipeline=2, precision="bf16", microbatches=2, pattern="tree"),
]
STAGE = ParallelSizes(pipeline=2, tensor=2, microbatches=2, recompute=True)
# A stage recomputes its forward up to the last collective.
RECOMPUTED = [replace(STAGE, sequence_parallel=True), replace(STAGE, schedule="interleaved")]


@pytest.mark.parametrize("every", [PATTERNS, RECOMPUTED], ids=["2 ranks", "4 ranks"])
def test_an_axis_sends_what_the_formulas_say_with_each_pattern_in_16_bits_and_with_recomputation(every):
    def work(cluster: Cluster) -> None:
        for sizes in every:
            hybrid, sent = a_hybrid(cluster, sizes), {}
            x, y = batch(2 * sizes.data * sizes.microbatches)
            rows = slice(len(x) // sizes.data)
            with counting(sent):
                hybrid.optimizer.zero_grad()
                hybrid.backward(x[rows], y[rows])
                hybrid.optimizer.step()
            assert counted_by_axis(sent) == traffic_of_axes(hybrid, is_clipped=False), sizes

    run_ranks(work, every[0].world_size)


def test_the_picture_has_the_bytes_of_each_axis_beside_its_formula():
    def drawn_by(cluster: Cluster) -> str:
        hybrid = a_hybrid(cluster, ParallelSizes(pipeline=2, data=2, microbatches=4, pattern="ring"))
        return drawn_traffic(hybrid, traffic_of_axes(hybrid, is_clipped=True))

    assert run_ranks(drawn_by, 4)[0].splitlines() == [
        "a rank sends in a step   stage 0   stage 1   by formula",
        "pipeline                 3.5 kB    3.5 kB    an activation and a gradient for each microbatch, over "
        "each boundary, and the gradient of the tied embedding",
        "data                     7.8 kB    7.5 kB    all-reduce of the gradients",
    ]
