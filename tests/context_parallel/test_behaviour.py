"""Grade ring attention by what it does: the result, all gradients, and the bytes that a rank sends."""

import torch
import torch.nn.functional as F

from context_parallel.parallel_model import SharedSequence
from context_parallel.sequence_cut import SequenceCut
from context_parallel.train_ring_attention import ring_attention
from lab.check import assert_same
from lab.cluster import Cluster
from lab.ranks import run_ranks
from lab.trace.ledger import LEDGER


def compare(cluster: Cluster, length: int) -> None:
    n = cluster.world_size
    torch.manual_seed(0)
    q, k, v, dy = (torch.randn(2, 2, length, 4).double() for _ in range(4))
    cut = SequenceCut.zigzag(length, n)
    tokens = cut.positions(cluster.rank)
    own = [x[:, :, tokens].clone().requires_grad_() for x in (q, k, v)]
    full = [x.requires_grad_() for x in (q, k, v)]
    y = F.scaled_dot_product_attention(*full, is_causal=True)
    y.backward(dy)
    ours = ring_attention(*own, SharedSequence(None, cut))
    what = f"{length} tokens on {n} ranks:"
    assert_same({"output": ours.detach()}, {"output": y.detach()[:, :, tokens]}, what=what)
    ours.backward(dy[:, :, tokens])
    got = dict(zip("qkv", (x.grad for x in own), strict=True))
    assert_same(got, {name: x.grad[:, :, tokens] for name, x in zip("qkv", full, strict=True)}, what=what)


def test_two_ranks_attend_as_one_process_does():
    run_ranks(compare, 2, 8)


def test_any_number_of_ranks_and_tokens_attends_as_one_process_does():
    for n, length in ((1, 5), (3, 12), (4, 18)):
        run_ranks(compare, n, length)


def test_a_rank_sends_keys_and_values_round_the_ring_once_forward_and_twice_backward():
    def work(cluster: Cluster) -> None:
        n, cut = cluster.world_size, SequenceCut.zigzag(24, cluster.world_size)
        q, k, v = (torch.ones(1, 2, 24 // n, 4).double().requires_grad_() for _ in range(3))
        block = k.nbytes + v.nbytes
        for what, rounds in (("forward", n - 1), ("backward", 2 * n - 1)):
            LEDGER.clear()
            if what == "forward":
                y = ring_attention(q, k, v, SharedSequence(None, cut))
            else:
                y.sum().backward()
            sent = LEDGER.total().bytes_sent / block
            assert sent <= rounds + 0.2, (
                f"the {what} on {n} ranks sends the keys and values of {sent:.2f} ranks, and not {rounds}"
            )

    run_ranks(work, 3)
