"""Context parallel training equals one process: all gradients in each step, and the parameters after it."""

import math
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.models.model import GPT, loss_of
from lab.ranks import run_ranks
from tests.context_parallel.equivalence import (
    ALL_TO_ALL,
    RING,
    TEXTBOOK_RING,
    VARIANTS,
    Variant,
    compare_attention,
    compare_with_one_process,
    documents_with_borders,
    gpt,
    mean_over_tokens,
    text,
)

# Of 16 tokens: borders inside pieces and between them, documents longer than the piece of any rank, documents
# of one token, and a sequence that is one document.
BORDERS = ((3, 8, 10), (12,), (1, 2, 4, 15), ())


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_training_equals_one_process(n: int):
    def work(cluster: Cluster) -> None:
        for variant in VARIANTS:
            compare_with_one_process(cluster, variant, 17)
            compare_with_one_process(cluster, variant, 24, num_kv_heads=n, tied=False, num_layers=1)
            compare_with_one_process(cluster, variant, 9, num_layers=1, documents=DOCUMENTS_OF_9)
        frozen = ("token_embedding", "blocks.0.attention.k_proj", "blocks.1.mlp", "final_norm")
        for variant in (RING, ALL_TO_ALL):
            compare_with_one_process(cluster, variant, 12, frozen=frozen)
            compare_with_one_process(cluster, variant, 12, backwards=2)

    run_ranks(work, n)


DOCUMENTS_OF_9 = documents_with_borders(9, (4, 5), (2,))


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_sequences_that_the_ranks_do_not_divide_leave_some_of_them_without_a_token(n: int):
    def work(cluster: Cluster) -> None:
        for length in (1, 3, 5):
            for variant in VARIANTS:
                compare_with_one_process(cluster, variant, length, steps=1, num_layers=1)
        if n == 4:
            assert [RING.cut(1, n).length(rank) for rank in range(n)] == [1, 0, 0, 0]
            assert [ALL_TO_ALL.cut(5, n).length(rank) for rank in range(n)] == [2, 1, 1, 1]

    run_ranks(work, n)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_attention_and_its_gradients_equal_one_process_under_any_mask(n: int):
    def work(cluster: Cluster) -> None:
        heads = 4 * n
        for variant in VARIANTS:
            for length in (1, 3, 16, 19):
                for kv_heads in (heads, 2 * n):
                    compare_attention(variant, length, True, None, heads, kv_heads)
                compare_attention(variant, length, False, None, heads)
            for rows in (BORDERS[:2], BORDERS[2:]):
                documents = documents_with_borders(16, *rows)
                for is_causal in (True, False):
                    compare_attention(variant, 16, is_causal, documents, heads, 2 * n)

    run_ranks(work, n)


def test_the_ranks_of_a_group_cut_sequences_of_their_own():
    def work(cluster: Cluster) -> None:
        groups = [dist.new_group([0, 3]), dist.new_group([1, 2])]
        group, length = [(groups[0], 5), (groups[1], 14)][cluster.rank in (1, 2)]
        for variant in VARIANTS:
            compare_with_one_process(cluster, variant, length, group=group)

    run_ranks(work, 4)


def checkpoint_blocks(model: GPT) -> None:
    """Let the backward compute each block's forward again."""
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def test_a_block_that_is_computed_again_in_the_backward_gives_the_same_gradients():
    def work(cluster: Cluster) -> None:
        for variant in VARIANTS:
            compare_with_one_process(cluster, variant, 10, steps=1, change=checkpoint_blocks)

    run_ranks(work, 3)


def test_autocast_to_bfloat16_stays_near_float32():
    def work(cluster: Cluster) -> None:
        x, y = text(20)
        reference = gpt().float()
        expected = loss_of(reference(x), y)
        expected.backward()
        for variant in VARIANTS:
            ours = variant.wrap(gpt().float())
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = ours.loss(ours(x), y)
            loss.backward()
            ours.finish_gradient_sync()
            assert mean_over_tokens(loss).item() == pytest.approx(expected.item(), rel=1e-3), str(variant)
            for name, parameter in reference.named_parameters():
                found = ours.module.get_parameter(name).grad
                # The gradient of the keys' bias is zero but for rounding.
                limit = 0.05 * parameter.grad.norm() + 1e-3
                assert (found - parameter.grad).norm() < limit, (name, str(variant))

    run_ranks(work, 3)


def test_all_to_all_attention_drops_out_and_the_ring_refuses_to():
    def work(cluster: Cluster) -> list[str]:
        x, y = text(12)
        model = ALL_TO_ALL.wrap(gpt(dropout=0.2))
        torch.manual_seed(cluster.rank)
        first, second = (model.loss(model(x), y) for _ in range(2))
        assert first.item() != second.item()
        second.backward()
        model.finish_gradient_sync()
        assert all(math.isfinite(p.grad.norm()) and p.grad.any() for p in model.parameters())
        sentences = []
        for variant in (RING, TEXTBOOK_RING):
            model = variant.wrap(gpt(dropout=0.2))
            with pytest.raises(WorkbookError) as error:
                model(x)
            sentences.append(str(error.value))
            model.eval()
            plain = gpt(dropout=0.2).eval()
            torch.testing.assert_close(model(x), model.own(plain(x)), rtol=1e-9, atol=1e-12)
        return sentences

    sentence = (
        "Ring attention drops no attention probabilities, and the model asks for 0.2: take all-to-all "
        "attention, or set `dropout` of the model's attention to 0."
    )
    assert run_ranks(work, 2) == [[sentence] * 2] * 2


def test_a_model_is_refused_that_cannot_be_cut():
    def work(cluster: Cluster) -> list[str]:
        sentences = []
        for variant, model in (
            (ALL_TO_ALL, gpt(num_kv_heads=3)),
            (Variant(ALL_TO_ALL.attention, RING.cut), gpt()),
            (RING, RING.wrap(gpt()).module),
            (RING, torch.nn.Linear(2, 2)),
        ):
            with pytest.raises(WorkbookError) as error:
                variant.wrap(model)(text(4)[0])
            sentences.append(str(error.value))
        with pytest.raises(ValueError, match="25 tokens in a row exceed block_size 24"):
            RING.wrap(gpt())(text(25)[0])
        return sentences

    heads, order, twice, other = run_ranks(work, 2)[0]
    assert heads == (
        "All-to-all attention divides heads, and 3 heads of keys and values cannot be divided among 2 ranks "
        "equally: choose a number of ranks that divides 3, or ring attention."
    )
    assert order.startswith(
        "All-to-all attention needs the tokens in the order of the ranks: cut the sequence"
    )
    assert twice == "The model is context parallel already: wrap a plain one."
    assert other == "ContextParallel takes a GPT, not a Linear."
