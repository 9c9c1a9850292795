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

B, T, D, ITEM = 4, 12, 24, 8  # the ranks divide B * T and D
BLOCK_SIZE = 16


def sent_in_a_step(num_layers: int, by_tokens: bool, forward_only: bool = False, overlap: bool = True):
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


@pytest.mark.parametrize("n", [2, 3])
def test_a_block_all_reduces_the_residual_stream_or_gathers_and_scatters_it(n: int):
    def count(cluster: Cluster) -> None:
        half = (n - 1) * B * T * D * ITEM // n  # of an all-reduce
        loss = 2 * (n - 1) * 3 * B * T * ITEM // n
        for layers in (1, 3):
            once = (2 * layers + 1) * half
            assert sent_in_a_step(layers, False, forward_only=True) == {"all_reduce": 2 * once}
            for overlap in (True, False):
                assert sent_in_a_step(layers, False, overlap=overlap) == {"all_reduce": 4 * once + loss}

            forward = sent_in_a_step(layers, True, forward_only=True)
            assert forward == {"all_gather": once, "reduce_scatter": once}
            replicated = (6 * layers + 2) * D + BLOCK_SIZE * D
            for overlap in (True, False):
                assert sent_in_a_step(layers, True, overlap=overlap) == {
                    "all_reduce": loss + 2 * (n - 1) * replicated * ITEM // n,
                    "all_gather": (2 + overlap) * once,  # with overlap those of the forward again
                    "reduce_scatter": 2 * once,
                }

    run_ranks(count, n)
