"""Tell, in one straight line for each technique, why communication among ranks equals one process.

The matrix of sizes, dtypes, roots and ranks stands in test_collectives.py.
"""

import torch
from torch import nn

from comm import collectives
from comm.algorithms import bruck, hypercube, pairwise, pipelined_ring, ring, sharded_tree, star, tree
from comm.functions import copy_to_ranks, sum_over_ranks
from comm.shards import shards_of
from comm.wire.gloo_wire import peer_wire
from lab.check import assert_same
from lab.cluster import Cluster
from lab.ranks import run_ranks
from lab.trace.ledger import LEDGER, Entry, Traffic
from tests.comm.helpers import short_segments
from tests.on_ranks import on_ranks


@on_ranks(4)
def test_ring_all_reduce_equals_one_process(cluster: Cluster):
    # One process computes the gradient of a toy model on four examples: 12 numbers.
    torch.manual_seed(0)
    layer, x = nn.Linear(5, 2).double(), torch.randn(4, 5).double()
    layer(x).square().sum().backward()
    expected = torch.cat([layer.weight.grad.flatten(), layer.bias.grad])

    # Rank r has example r only. Its gradient is one of the four terms of that sum.
    layer.zero_grad()
    layer(x[cluster.rank]).square().sum().backward()
    gradient = torch.cat([layer.weight.grad.flatten(), layer.bias.grad])

    # The ring divides the 12 numbers into 4 chunks of 3. Chunks are views of the gradient.
    wire, right = peer_wire(None), (cluster.rank + 1) % 4
    chunks, expected_chunks = shards_of(gradient, 4), shards_of(expected, 4)
    own = [chunk.clone() for chunk in chunks]

    # Reduce-scatter: chunk c starts at rank c + 1 and moves right. After 3 steps it is at rank c, and
    # each rank has added its own term on the way. The chunk that a rank sent first has not changed there.
    ring.reduce_chunks(wire, chunks, "sum")
    own_chunk = f"chunk {cluster.rank}"
    after = "after reduce_chunks, in an all-reduce of 12 numbers on 4 ranks,"
    assert_same({own_chunk: chunks[cluster.rank]}, {own_chunk: expected_chunks[cluster.rank]}, what=after)
    first = (cluster.rank - 1) % 4
    is_kept = torch.equal(chunks[first], own[first])
    assert is_kept, f"{after} chunk {first} of rank {cluster.rank}, which it sends first, must not change"
    assert not torch.allclose(chunks[right], expected_chunks[right])

    # All-gather: the complete chunks take 3 more steps to the right, and every rank keeps a copy.
    ring.gather_chunks(wire, chunks)
    after = "after gather_chunks, in an all-reduce of 12 numbers on 4 ranks,"
    names = [f"chunk {number}" for number in range(4)]
    complete = dict(zip(names, shards_of(gradient, 4), strict=True))
    assert_same(complete, dict(zip(names, expected_chunks, strict=True)), what=after)

    # The collective does both. Each rank sends 2 * 3 messages of one chunk: 2 * 3/4 of the tensor.
    again = torch.cat(own)
    collectives.all_reduce(again, pattern="ring")
    assert torch.equal(again, gradient)
    assert LEDGER.rows()[Entry("all_reduce", "ring")] == Traffic(6 * 3 * 8, 6)


def test_pipelined_ring_all_reduce_equals_one_process():
    def work(cluster: Cluster) -> None:
        # Three ranks have 12 numbers each. One process adds them up.
        torch.manual_seed(0)
        of_ranks = torch.randn(3, 12).double()
        expected = of_ranks.sum(0)

        # The textbook's ring sends a chunk of 4 numbers as one message: 2 * 2 messages.
        simple = of_ranks[cluster.rank].clone()
        collectives.all_reduce(simple, pattern="ring")
        assert LEDGER.rows()[Entry("all_reduce", "ring")] == Traffic(4 * 4 * 8, 4)

        # Here a segment is 16 bytes, so a chunk is two segments of two numbers. A rank sends a segment on as
        # soon as it has added its own, while the next one arrives: as many bytes, twice as many messages.
        fast = of_ranks[cluster.rank].clone()
        collectives.all_reduce(fast, pattern="pipelined_ring")
        assert LEDGER.rows()[Entry("all_reduce", "pipelined_ring")] == Traffic(4 * 4 * 8, 8)

        # Both add the same terms in the same order, so they agree bit by bit.
        torch.testing.assert_close(simple, expected, rtol=1e-9, atol=1e-12)
        assert torch.equal(fast, simple)

        # A reduce-scatter is the first half: rank r gets the sum of chunk r, and its input stays as it was.
        full, shard = of_ranks[cluster.rank].clone(), torch.empty(4).double()
        pipelined_ring.reduce_scatter(peer_wire(None), shard, full, "sum")
        assert torch.equal(shard, simple[4 * cluster.rank : 4 * cluster.rank + 4])
        assert torch.equal(full, of_ranks[cluster.rank])

    with short_segments(16):
        run_ranks(work, 3)


@on_ranks(3)
def test_flat_scatter_and_gather_equal_one_process(cluster: Cluster):
    # One process squares seven numbers.
    numbers = torch.arange(7).double()

    # Rank 1 has them and sends each other rank its part directly: the parts have 3, 2 and 2 numbers.
    shard = torch.empty([3, 2, 2][cluster.rank]).double()
    full = numbers.clone() if cluster.rank == 1 else None
    star.scatter(peer_wire(None), shard, full, root=1)
    assert torch.equal(shard, numbers.tensor_split(3)[cluster.rank])

    # Each rank squares its part, and sends it directly back to the root.
    shard.square_()
    star.gather(peer_wire(None), full, shard, root=1)
    assert cluster.rank != 1 or torch.equal(full, numbers.square())


@on_ranks(5)
def test_tree_broadcast_equals_one_process(cluster: Cluster):
    # One process has the weights of a toy model, and their gradient for one example.
    torch.manual_seed(2)
    alone, x = nn.Linear(3, 2, bias=False).double(), torch.ones(3).double()
    alone(x).square().sum().backward()

    # Each of five ranks draws other weights. Those of rank 2, the root, are the model's.
    torch.manual_seed(cluster.rank)
    layer = nn.Linear(3, 2, bias=False).double()
    assert torch.equal(layer.weight, alone.weight) == (cluster.rank == 2)

    # Round 1: rank 2 sends to rank 1, which is four places further on. Round 2: 2 sends to 4. Round 3: 2
    # sends to 3, and 4 sends to 0. Every rank that has the weights sends them on, so 3 rounds reach 5
    # ranks.
    tree.broadcast(peer_wire(None), layer.weight.detach(), root=2)
    assert torch.equal(layer.weight, alone.weight)
    sent = LEDGER.rows().get(Entry("point_to_point", "direct"), Traffic()).messages_sent
    assert sent == {2: 3, 4: 1}.get(cluster.rank, 0)

    # Equal weights have equal gradients.
    layer(x).square().sum().backward()
    assert torch.equal(layer.weight.grad, alone.weight.grad)


@on_ranks(4)
def test_tree_all_reduce_equals_one_process(cluster: Cluster):
    # Four ranks have three numbers each. One process adds them up.
    torch.manual_seed(0)
    of_ranks = torch.randn(4, 3).double()
    expected = of_ranks.sum(0)

    # Up the tree: 1 sends to 0 and 3 sends to 2, then 2 sends the sum of two ranks to 0.
    mine = of_ranks[cluster.rank].clone()
    tree.reduce(peer_wire(None), mine, "sum", root=0)
    if cluster.rank == 0:
        torch.testing.assert_close(mine, expected, rtol=1e-9, atol=1e-12)
    else:
        assert torch.equal(mine, of_ranks[cluster.rank])

    # Down the same tree: 0 sends to 2, then 0 sends to 1 and 2 sends to 3.
    tree.broadcast(peer_wire(None), mine, root=0)
    torch.testing.assert_close(mine, expected, rtol=1e-9, atol=1e-12)

    # The collective does both.
    again = of_ranks[cluster.rank].clone()
    collectives.all_reduce(again, pattern="tree")
    assert torch.equal(again, mine)


@on_ranks(4)
def test_sharded_tree_reduce_scatter_and_all_gather_equal_one_process(cluster: Cluster):
    # Four ranks have seven numbers each. One process adds them up. The shards have 2, 2, 2 and 1 numbers.
    torch.manual_seed(0)
    of_ranks = torch.randn(4, 7).double()
    expected, mine = of_ranks.sum(0), of_ranks[cluster.rank].clone()
    shard = torch.empty([2, 2, 2, 1][cluster.rank]).double()

    # Up the tree all seven numbers travel: 1 sends to 0 and 3 sends to 2, then 2 sends its sum to 0. Down
    # the tree 0 sends three numbers to 2, of which 2 sends one on to 3. And 0 sends two numbers to 1.
    sharded_tree.reduce_scatter(peer_wire(None), shard, mine, "sum")
    own = expected.tensor_split(4)[cluster.rank]
    torch.testing.assert_close(shard, own, rtol=1e-9, atol=1e-12)
    sent = [Traffic(5 * 8, 2), Traffic(7 * 8, 1), Traffic(8 * 8, 2), Traffic(7 * 8, 1)]
    assert LEDGER.total() == sent[cluster.rank]

    # An all-gather is the way back: shards go up the tree, and the full tensor comes down.
    LEDGER.clear()
    full = torch.empty(7).double()
    sharded_tree.all_gather(peer_wire(None), full, shard)
    torch.testing.assert_close(full, expected, rtol=1e-9, atol=1e-12)
    sent = [Traffic(14 * 8, 2), Traffic(2 * 8, 1), Traffic(10 * 8, 2), Traffic(1 * 8, 1)]
    assert LEDGER.total() == sent[cluster.rank]


@on_ranks(4)
def test_recursive_doubling_equals_one_process(cluster: Cluster):
    # Four ranks have three numbers each. One process adds them up.
    torch.manual_seed(0)
    of_ranks = torch.randn(4, 3).double()

    # Round 1: ranks 0 and 1 exchange their full tensors, and so do 2 and 3. Round 2: 0 and 2, 1 and 3.
    # After two rounds each rank has the sum of all four: two latencies, where the ring takes six.
    mine = of_ranks[cluster.rank].clone()
    hypercube.recursive_doubling(peer_wire(None), mine, "sum")
    torch.testing.assert_close(mine, of_ranks.sum(0), rtol=1e-9, atol=1e-12)
    assert LEDGER.total() == Traffic(2 * 3 * 8, 2)

    # Partners add the same two tensors in the same order, so the ranks agree bit by bit.
    pairs = of_ranks[0] + of_ranks[1], of_ranks[2] + of_ranks[3]
    assert torch.equal(mine, pairs[0] + pairs[1])


@on_ranks(4)
def test_halving_doubling_equals_one_process(cluster: Cluster):
    # Four ranks have eight numbers each. One process takes their mean.
    torch.manual_seed(0)
    of_ranks = torch.randn(4, 8).double()

    # Round 1: ranks 0 and 2 exchange halves, and so do 1 and 3. Each rank sends 4 numbers, and keeps 4
    # that are sums of two ranks. Round 2: 0 and 1, 2 and 3 exchange halves of what they keep. Each rank
    # sends 2 numbers, and keeps 2 that are sums of all four. Then the same exchanges in reverse order
    # make every tensor complete: 2 numbers, then 4. A rank sends 12 numbers, 2 * 3/4 of the tensor as in
    # the ring, but in 4 messages instead of 6.
    mine = of_ranks[cluster.rank].clone()
    hypercube.halving_doubling(peer_wire(None), mine, "mean")
    torch.testing.assert_close(mine, of_ranks.mean(0), rtol=1e-9, atol=1e-12)
    assert LEDGER.total() == Traffic((4 + 2 + 2 + 4) * 8, 4)


@on_ranks(3)
def test_pairwise_all_to_all_equals_one_process(cluster: Cluster):
    # One process transposes a matrix of 6 rows and 3 columns.
    torch.manual_seed(0)
    matrix = torch.randn(6, 3).double()

    # Each of three ranks has two rows. It needs one column, of which every rank has a part. So it sends
    # two numbers to each rank: the part of that rank's column that lies in its own rows.
    rows = matrix[2 * cluster.rank : 2 * cluster.rank + 2]
    outgoing, incoming = rows.t().contiguous().view(-1), torch.empty(6).double()
    pairwise.all_to_all(peer_wire(None), incoming, outgoing, [2, 2, 2], [2, 2, 2])

    # The arriving parts stand in rank order, so they are the column from top to bottom. A rank sends to
    # the two others only: its own part does not travel.
    assert torch.equal(incoming, matrix[:, cluster.rank])
    assert LEDGER.total() == Traffic(2 * 2 * 8, 2)


@on_ranks(5)
def test_bruck_all_gather_equals_one_process(cluster):
    # One process has 12 numbers. Five ranks have shards of 3, 3, 2, 2 and 2 numbers of them.
    torch.manual_seed(0)
    expected = torch.randn(12).double()
    shard = expected.tensor_split(5)[cluster.rank].clone()

    # Round 1: a rank receives the shard of the next rank. Round 2: those of the two ranks after it. Round
    # 3: the one that is still missing. So three messages bring four shards; a ring needs four messages.
    full = torch.empty(12).double()
    bruck.all_gather(peer_wire(None), full, shard)
    assert torch.equal(full, expected)

    # Rank 0 sends its own 3 numbers to rank 4, then those of ranks 0 and 1 to rank 3, and its own once
    # more to rank 1.
    if cluster.rank == 0:
        assert LEDGER.total() == Traffic((3 + 6 + 3) * 8, 3)


@on_ranks(4)
def test_bruck_all_to_all_equals_one_process(cluster):
    # One process transposes a matrix of 4 rows and 4 columns. Each of four ranks has a row, and needs a
    # column.
    torch.manual_seed(0)
    matrix = torch.randn(4, 4).double()
    row, column = matrix[cluster.rank].clone(), torch.empty(4).double()

    # Round 1: the numbers for the ranks at distance 1 and 3 move one rank to the right. Round 2: those at
    # distance 2, and those at distance 3 that have just arrived, move two ranks to the right.
    bruck.all_to_all(peer_wire(None), column, row)
    assert torch.equal(column, matrix[:, cluster.rank])
    assert torch.equal(row, matrix[cluster.rank])

    # Two messages of two numbers each: more numbers than the 3 of pairwise, and fewer messages.
    assert LEDGER.total() == Traffic((2 + 2) * 8, 2)


@on_ranks(2)
def test_a_function_and_its_conjugate_equal_one_process(cluster: Cluster):
    # One process: an MLP of two matrices, the loss, and the gradients of its input and its weights.
    torch.manual_seed(0)
    x = torch.randn(3, 4).double().requires_grad_()
    up, down = (torch.randn(*shape).double().requires_grad_() for shape in ((4, 6), (6, 4)))
    expected = (x @ up).relu() @ down
    expected.square().sum().backward()

    # Each of two ranks has half of the hidden units: half of the columns of `up`, half of the rows of
    # `down`.
    half = slice(3 * cluster.rank, 3 * cluster.rank + 3)
    own_x = x.detach().clone().requires_grad_()
    own_up = up.detach()[:, half].clone().requires_grad_()
    own_down = down.detach()[half].clone().requires_grad_()

    # Both ranks have the same x and compute different units from it. So copy_to_ranks is the identity in
    # the forward. Its conjugate, in the backward, is a sum: each rank has one term of the gradient of x.
    hidden = (copy_to_ranks(own_x) @ own_up).relu()

    # Each rank has one term of the output, and sum_over_ranks adds the terms up. Both ranks compute the
    # same loss from the sum. So the conjugate is the identity: each term has the gradient of the sum.
    y = sum_over_ranks(hidden @ own_down)
    torch.testing.assert_close(y, expected, rtol=1e-9, atol=1e-12)

    # With both, every gradient is that of one process: all of x, and this rank's half of the weights.
    y.square().sum().backward()
    torch.testing.assert_close(own_x.grad, x.grad, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(own_up.grad, up.grad[:, half], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(own_down.grad, down.grad[half], rtol=1e-9, atol=1e-12)
