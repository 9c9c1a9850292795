"""Test that the bytes which each rank sends in a step equal the formulas exactly.

A is what one rank sends to all-reduce the residual stream, 2 (n-1)/n btd numbers. An all-gather or a
reduce-scatter of the stream sends half of A.

                        tensor parallel                  with sequence parallel
    a block, forward    2 A                              2 gathers and 2 scatters: 2 A
    a block, backward   2 A                              2 gathers and 2 scatters: 2 A, and 2 gathers again: A
    embedding, head     A forward, A backward            a scatter and a gather each; the head gathers again
    loss                3 numbers for each token         the same
    at the end          nothing                          all-reduces replicated parameters: 6 d a block,
                                                         2 d of the last norm, T d positions
"""

import pytest

from lab.cluster import Cluster
from lab.ranks import run_ranks
from lab.trace.ledger import LEDGER
from tensor_parallel.parallelize import parallelize
from tests.tensor_parallel.equivalence import gpt, text

B, T, D, ITEM = 4, 12, 24, 8  # 1 to 4 ranks divide B * T and D
BLOCK_SIZE = 16


def sent_in_a_step(
    cluster: Cluster, num_layers: int, by_tokens: bool, forward_only: bool = False, overlap: bool = True
) -> dict[str, int]:
    """Return bytes by operation, without the headers of collectives."""
    model = parallelize(gpt(num_layers=num_layers, block_size=BLOCK_SIZE), None, by_tokens, overlap)
    x, y = text(T)
    LEDGER.clear()
    logits = model(x)
    if not forward_only:
        model.loss(logits, y).backward()
        model.finish_gradient_sync()
    rows = {entry: traffic for entry, traffic in LEDGER.rows().items() if entry.pattern != "header"}
    assert not any(entry.by_formula for entry in rows)
    return {entry.op: traffic.bytes_sent for entry, traffic in rows.items()}


@pytest.mark.parametrize("n", [2, 3, 4])
def test_a_block_all_reduces_the_residual_stream_twice_forward_and_twice_backward(n: int):
    def count(cluster: Cluster) -> None:
        stream = 2 * (n - 1) * B * T * D * ITEM // n
        loss = 2 * (n - 1) * 3 * B * T * ITEM // n
        for layers in (1, 3):
            forward = (2 * layers + 1) * stream
            assert sent_in_a_step(cluster, layers, False, forward_only=True) == {"all_reduce": forward}
            total = (4 * layers + 2) * stream + loss
            for overlap in (True, False):
                assert sent_in_a_step(cluster, layers, False, overlap=overlap) == {"all_reduce": total}

    run_ranks(count, n)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_with_sequence_parallel_the_same_bytes_are_gathers_and_scatters(n: int):
    def count(cluster: Cluster) -> None:
        half = (n - 1) * B * T * D * ITEM // n  # of an all-reduce
        loss = 2 * (n - 1) * 3 * B * T * ITEM // n
        for layers in (1, 3):
            times = 2 * layers + 1
            each = times * half
            forward = sent_in_a_step(cluster, layers, True, forward_only=True)
            assert forward == {"all_gather": each, "reduce_scatter": each}
            replicated = (6 * layers + 2) * D + BLOCK_SIZE * D
            assert sent_in_a_step(cluster, layers, True) == {
                "all_reduce": loss + 2 * (n - 1) * replicated * ITEM // n,
                "all_gather": 3 * each,  # forward, backward, and those of the forward again
                "reduce_scatter": 2 * each,
            }
            without = sent_in_a_step(cluster, layers, True, overlap=False)
            assert (without["all_gather"], without["reduce_scatter"]) == (2 * each, 2 * each)

    run_ranks(count, n)


def test_one_rank_sends_nothing():
    def count(cluster: Cluster) -> None:
        for by_tokens in (False, True):
            assert sent_in_a_step(cluster, 1, by_tokens) == {}

    run_ranks(count, 1)
