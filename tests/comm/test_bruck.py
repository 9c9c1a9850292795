"""Bruck's patterns equal one process, send few messages, and refuse parts of different sizes on all ranks."""

import pytest
import torch

from comm import collectives
from comm.algorithms import bruck
from comm.transport.choice import use_transport
from comm.wire.wire import peer_wire
from lab.ranks import run_ranks
from lab.trace.ledger import LEDGER, Traffic
from tests.comm.mismatches import error_text, works

SENTENCE = "all_to_all: in the pattern bruck all parts of all ranks must have the same size; take pairwise."


def test_bruck_all_gather_equals_one_process():
    def work(cluster) -> None:
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

    run_ranks(work, 5)


def test_bruck_all_to_all_equals_one_process():
    def work(cluster) -> None:
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

    run_ranks(work, 4)


@pytest.mark.parametrize("transport", ["auto", "sockets", "gloo"])
def test_parts_of_different_sizes_end_in_one_sentence_on_all_ranks(transport: str):
    def differ(cluster) -> list[str]:
        use_transport(transport)
        r, texts = cluster.rank, []
        of_one_pair = [[1, 2, 1], [1, 1, 1], [1, 1, 1]]  # rank 2 does not see that they differ
        of_one_rank = [[1, 2, 1], [2, 1, 1], [1, 1, 1]]
        by_rank = [[1, 1, 1], [1, 1, 2], [1, 2, 3]]
        for sizes in (of_one_pair, of_one_rank, by_rank):
            outs, ins = [row[r] for row in sizes], sizes[r]
            full, out = torch.ones(sum(ins)), torch.empty(sum(outs))
            texts.append(error_text(lambda: collectives.all_to_all(out, full, outs, ins, pattern="bruck")))
            assert works()
        return texts

    assert run_ranks(differ, 3, group_timeout=20) == [[SENTENCE] * 3] * 3
