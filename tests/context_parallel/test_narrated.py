"""Tell, in one straight line for each technique, why attention of a sequence that is cut equals one process.

The matrix of cuts, kernels, ranks and masks stands in test_equivalence.py.
"""

import torch
import torch.nn.functional as F

from comm.functions import exchange_shards
from comm.point_to_point import InFlightShift
from context_parallel.block_attention import join_results
from context_parallel.parallel_model import SharedSequence
from context_parallel.sequence_cut import SequenceCut
from context_parallel.train_all_to_all_attention import all_to_all_attention
from context_parallel.train_ring_attention import ring_attention
from lab.cluster import Cluster
from tests.on_ranks import on_ranks


@on_ranks(3)
def test_ring_attention_equals_one_process(cluster: Cluster):
    rank = cluster.rank

    # One process attends: 6 tokens, each with a query, a key and a value of 4 numbers. Each query attends
    # to the keys of its own token and of all tokens before it.
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, 6, 4).double().requires_grad_() for _ in range(3))
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    dy = torch.randn(1, 1, 6, 4).double()
    expected.backward(dy)

    # Three ranks have two tokens each. The zigzag cut gives a rank an early token and a late one. The
    # queries of rank 0 attend to 1 and 6 keys, those of rank 1 to 2 and 5, those of rank 2 to 3 and 4. So
    # all ranks have 7 pairs to compute.
    cut = SequenceCut.zigzag(6, 3)
    tokens = cut.positions(rank)
    assert tokens.tolist() == [[0, 5], [1, 4], [2, 3]][rank]
    own_q, own_k, own_v = (x.detach()[:, :, tokens].requires_grad_() for x in (q, k, v))

    # Now the queries stay, and keys and values travel. After each step they are on the next rank, and
    # after two steps each rank has seen all of them.
    visiting, y, lse = torch.stack([own_k, own_v]).detach(), None, None
    for step in range(3):
        owner = (rank - step) % 3
        keys, values = visiting

        # A rank scores its queries against the keys that it has now. Which of the pairs may attend
        # depends on the positions in the full sequence, and not on the places in the two chunks.
        may_attend = cut.positions(owner)[None, :] <= tokens[:, None]
        scores = (own_q @ keys.transpose(-1, -2) / 2).masked_fill(~may_attend, -torch.inf)

        # The result over these keys alone has its own sum of exponentials. The first keys are the rank's
        # own, so that each query has found a key from the beginning.
        block_lse = scores.logsumexp(-1).clamp(min=-1e30)
        block_y = torch.exp(scores - block_lse.unsqueeze(-1)) @ values

        # Two results are joined in the proportion of their sums of exponentials.
        y, lse = (block_y, block_lse) if step == 0 else join_results(y, lse, block_y, block_lse)
        if step < 2:
            visiting = InFlightShift(visiting, torch.empty_like(visiting)).wait()

    # The queries have met all keys, and no rank has ever had more than two tokens' keys at a time.
    torch.testing.assert_close(y, expected[:, :, tokens], rtol=1e-9, atol=1e-12)

    # The lesson's function does the same, and its backward sends keys and values round once more.
    own_y = ring_attention(own_q, own_k, own_v, SharedSequence(None, cut))
    torch.testing.assert_close(own_y, y, rtol=1e-9, atol=1e-12)
    own_y.backward(dy[:, :, tokens])

    # A query's gradient is complete on its rank, which has met all keys. A key's gradient has terms of
    # the queries of all ranks: it has travelled behind the key, and has come home in the end.
    torch.testing.assert_close(own_q.grad, q.grad[:, :, tokens], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(own_k.grad, k.grad[:, :, tokens], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(own_v.grad, v.grad[:, :, tokens], rtol=1e-9, atol=1e-12)


@on_ranks(2)
def test_all_to_all_attention_equals_one_process(cluster: Cluster):
    rank = cluster.rank

    # One process attends: 6 tokens, 2 heads, 4 numbers in each head.
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 6, 4).double().requires_grad_() for _ in range(3))
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    dy = torch.randn(1, 2, 6, 4).double()
    expected.backward(dy)

    # Two ranks have three tokens each, and both heads of them.
    cut = SequenceCut.contiguous(6, 2)
    tokens = cut.positions(rank)
    assert tokens.tolist() == [[0, 1, 2], [3, 4, 5]][rank]
    own = [x.detach()[:, :, tokens].requires_grad_() for x in (q, k, v)]

    # A head needs all tokens and no other head. So rank 0 sends its tokens' head 1 to rank 1, and gets
    # head 0 of the other tokens for it: heads leave along dim 1, and arrive along dim 1 as tokens.
    own_heads = []
    for x in own:
        arrived = exchange_shards(x, 1)
        own_heads.append(torch.cat(arrived.split(1, 1), 2))
        assert own_heads[-1].shape == (1, 1, 6, 4)

    # Each rank computes the attention of its head as one process does, the causal mask included.
    y = F.scaled_dot_product_attention(*own_heads, is_causal=True)
    torch.testing.assert_close(y, expected[:, [rank]], rtol=1e-9, atol=1e-12)

    # The second all-to-all brings the results back to the ranks that have the tokens.
    back = exchange_shards(torch.cat(y.split(3, 2), 1), 1)
    torch.testing.assert_close(back, expected[:, :, tokens], rtol=1e-9, atol=1e-12)

    # The lesson's function does the same. The backward of an all-to-all is an all-to-all, so each
    # gradient comes home to its token.
    own_y = all_to_all_attention(*own, SharedSequence(None, cut))
    torch.testing.assert_close(own_y, back, rtol=1e-9, atol=1e-12)
    own_y.backward(dy[:, :, tokens])
    for x, full in zip(own, (q, k, v), strict=True):
        torch.testing.assert_close(x.grad, full.grad[:, :, tokens], rtol=1e-9, atol=1e-12)
