"""Context parallel training equals one process: all gradients in each step, and the parameters after it."""

import math
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from context_parallel.parallel_model import ContextParallel
from context_parallel.train_ring_attention import ring_attention
from lab.check import assert_same, gradients
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.models.model import GPT, GPTConfig, loss_of
from lab.ranks import run_ranks
from lab.trace.memory import saved_activations
from tests.context_parallel.equivalence import (
    ALL_TO_ALL,
    CONTIGUOUS_RING,
    RING,
    TEXTBOOK_RING,
    VARIANTS,
    Variant,
    compare_attention,
    documents_with_borders,
    gpt,
    text,
)
from tests.context_parallel.gpu_kernel import gpu_kernel
from tests.equivalence import compare_with_one_process
from tests.on_ranks import on_ranks
from tests.tasks import heads_task
from tests.wrappers import named

# Of 16 tokens: borders inside chunks and between them, documents longer than the chunk of any rank, documents
# of one token, and a sequence that is one document.
BORDERS = ((3, 8, 10), (12,), (1, 2, 4, 15), ())


# The number of ranks, the variants, the length, and the borders of documents.
ATTENTION: dict[str, tuple[int, tuple[Variant, ...], int, tuple[tuple[int, ...], ...]]] = {
    "queries meet all keys and gradients come home": (3, (RING, TEXTBOOK_RING), 12, ()),
    "no query attends to a later key": (3, (CONTIGUOUS_RING, RING), 12, ()),
    "no query attends to another document": (3, (CONTIGUOUS_RING, RING), 12, ((3, 8), (10,))),
    "each head comes back to its place": (2, (ALL_TO_ALL,), 6, ()),
    "one rank": (1, (RING,), 5, ()),
    "two ranks": (2, (RING,), 8, ()),
    "four ranks and uneven chunks": (4, (RING,), 18, ()),
}


@pytest.mark.parametrize("what", ATTENTION)
def test_attention_equals_one_process(what: str):
    n, variants, length, borders = ATTENTION[what]
    documents = documents_with_borders(length, *borders) if borders else None

    def work(cluster: Cluster) -> None:
        for variant in variants:
            compare_attention(cluster, variant, length, documents)

    run_ranks(work, n)


@on_ranks(2)
def test_a_rank_uses_its_own_positions_and_targets(cluster: Cluster):
    own = [[0, 1, 6, 7], [2, 3, 4, 5]][cluster.rank]
    plain, ours = gpt(num_layers=1), RING.wrap(gpt(num_layers=1))
    x, y = text(8)
    logits, found = plain(x)[:, own], ours(x)
    actual = {"logits": found.detach(), "loss": ours.loss(found, y).detach()}
    expected = {"logits": logits.detach(), "loss": loss_of(logits, y[:, own]).detach()}
    assert_same(actual, expected, what="forward of the ring, 8 tokens, 2 ranks,")


@pytest.mark.parametrize("n", [1, 2, 3])
@on_ranks("n")
def test_attention_and_its_gradients_equal_one_process_under_any_mask(cluster: Cluster, n: int):
    heads = 4 * n
    for variant in VARIANTS:
        for length in (3, 16, 19):
            compare_attention(cluster, variant, length, None, heads, 2 * n)
        compare_attention(cluster, variant, 16, None, heads)
        for rows in (BORDERS[:2], BORDERS[2:]):
            documents = documents_with_borders(16, *rows)
            compare_attention(cluster, variant, 16, documents, heads, 2 * n)


@on_ranks(1, 3)
def test_ring_attention_with_the_kernel_of_a_gpu_equals_one_process(cluster: Cluster):
    with gpu_kernel():
        for variant in (RING, CONTIGUOUS_RING):
            for length in (16, 3, 200):
                compare_attention(cluster, variant, length, None, 4, 2)
            for rows in (BORDERS[:2], BORDERS[2:]):
                compare_attention(cluster, variant, 16, documents_with_borders(16, *rows), 4, 2)


@pytest.mark.parametrize("n", [3, 4])
@on_ranks("n")
def test_sequences_that_the_ranks_do_not_divide_leave_some_of_them_without_a_token(cluster: Cluster, n: int):
    for length in (1, 5):
        for name in ("ring", "contiguous ring", "all to all"):
            compare_with_one_process(cluster, named(name), heads_task(length), (1,))
    if n == 4:
        assert [RING.cut(1, n).length(rank) for rank in range(n)] == [1, 0, 0, 0]


def checkpoint_blocks(model: GPT) -> None:
    """Let the backward compute each block's forward again."""
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


@on_ranks(2)
def test_blocks_computed_again_in_the_backward_have_the_gradients_of_one_process(cluster: Cluster):
    for name in ("ring", "all to all"):
        compare_with_one_process(cluster, named(name), heads_task(10), (2,), change=checkpoint_blocks)


def test_four_ranks_keep_at_most_0_30_of_one_processs_activations():
    config = GPTConfig(vocab_size=32, block_size=1024, num_layers=2, num_heads=4, width=16)
    tokens = torch.randint(32, (1, 1024))

    def kept(cluster: Cluster) -> list[int]:
        found = []
        for variant in (RING, ALL_TO_ALL):
            model = variant.wrap(GPT(config))
            with saved_activations(model.parameters) as saved:
                model.loss(model(tokens), tokens)
            found.append(saved.bytes)
        return found

    plain = GPT(config)
    with saved_activations(plain.parameters) as alone:
        loss_of(plain(tokens), tokens)
    for of_rank in run_ranks(kept, 4):
        assert all(alone.bytes / 4 * 0.9 < each <= 0.30 * alone.bytes for each in of_rank)


@on_ranks(2)
def test_all_to_all_attention_drops_out_and_the_ring_refuses_to(cluster: Cluster):
    x, y = text(12)
    model = ALL_TO_ALL.wrap(gpt(dropout=0.2))
    torch.manual_seed(cluster.rank)
    first, second = (model.loss(model(x), y) for _ in range(2))
    assert first.item() != second.item()
    second.backward()
    model.finish_gradient_sync()
    assert all(math.isfinite(p.grad.norm()) and p.grad.any() for p in model.parameters())

    model = RING.wrap(gpt(dropout=0.2))
    with pytest.raises(WorkbookError, match=r"drop.*0\.2"):
        model(x)
    plain = gpt(dropout=0.2).eval()
    model.eval()
    torch.testing.assert_close(model(x), model.own(plain(x)), rtol=1e-9, atol=1e-12)


@on_ranks(2)
def test_a_model_is_refused_that_cannot_be_cut(cluster: Cluster):
    for variant, model, sentence in (
        (ALL_TO_ALL, gpt(num_kv_heads=3), "3 heads of keys and values cannot be divided among 2 ranks"),
        (Variant(False, RING.cut), gpt(), "needs the tokens in the order of the ranks"),
        (RING, torch.nn.Linear(2, 2), "^ContextParallel takes a GPT, not a Linear.$"),
    ):
        with pytest.raises(WorkbookError, match=sentence):
            variant.wrap(model)(text(4)[0])
    with pytest.raises(ValueError, match="25 tokens in a row exceed block_size 24"):
        RING.wrap(gpt())(text(25)[0])


@on_ranks(2)
def test_losses_may_be_computed_after_forwards_of_several_lengths(cluster: Cluster):
    (x, y), model = text(16), gpt(0)
    wrapped = ContextParallel(gpt(cluster.rank), ring_attention)
    lengths = (x.shape[1], x.shape[1] // 2)
    logits = [wrapped(x[:, :length]) for length in lengths]
    losses = [wrapped.loss(one, y[:, :n]) for one, n in zip(logits, lengths, strict=True)]
    torch.stack(losses).sum().backward()
    wrapped.finish_gradient_sync()
    torch.stack([loss_of(model(x[:, :n]), y[:, :n]) for n in lengths]).sum().backward()
    assert_same(gradients(wrapped.module), gradients(model))
