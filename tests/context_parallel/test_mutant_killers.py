"""Small tests without arguments, each of one property: what a learner's own implementation fails first."""

from context_parallel.sequence_cut import SequenceCut
from lab.check import assert_same
from lab.cluster import Cluster
from lab.models.model import loss_of
from lab.ranks import run_ranks
from tests.context_parallel.equivalence import (
    ALL_TO_ALL,
    RING,
    RTOL,
    TEXTBOOK_RING,
    Variant,
    compare_attention,
    compare_with_one_process,
    documents_with_borders,
    gpt,
    text,
)

CONTIGUOUS_RING = Variant(RING.attention, SequenceCut.contiguous)


def test_queries_meet_all_keys_and_gradients_come_home():
    def work(cluster: Cluster) -> None:
        for variant in (RING, TEXTBOOK_RING):
            compare_attention(variant, 12, is_causal=False)

    run_ranks(work, 3)


def test_no_query_attends_to_a_later_key():
    def work(cluster: Cluster) -> None:
        for variant in (CONTIGUOUS_RING, RING):
            compare_attention(variant, 12)

    run_ranks(work, 3)


def test_no_query_attends_to_another_document():
    def work(cluster: Cluster) -> None:
        documents = documents_with_borders(12, (3, 8), (10,))
        for variant in (CONTIGUOUS_RING, RING):
            compare_attention(variant, 12, is_causal=False, documents=documents)
            compare_attention(variant, 12, documents=documents)

    run_ranks(work, 3)


def test_each_head_comes_back_to_its_place():
    run_ranks(lambda cluster: compare_attention(ALL_TO_ALL, 6), 2)


def test_a_rank_uses_its_own_positions_and_targets():
    def work(cluster: Cluster) -> None:
        own = [[0, 1, 6, 7], [2, 3, 4, 5]][cluster.rank]
        plain, ours = gpt(num_layers=1), RING.wrap(gpt(num_layers=1))
        x, y = text(8)
        logits = plain(x)[:, own]
        found = ours(x)
        assert_same(
            {"logits": found.detach(), "loss": ours.loss(found, y).detach()},
            {"logits": logits.detach(), "loss": loss_of(logits, y[:, own]).detach()},
            RTOL,
            "forward of the ring, 8 tokens, 2 ranks,",
        )

    run_ranks(work, 2)


def test_the_terms_of_all_ranks_add_up_to_each_gradient():
    def work(cluster: Cluster) -> None:
        # The gradient of the keys' bias is rounding alone.
        compare_with_one_process(
            cluster, RING, 9, steps=2, frozen=("blocks.0.attention.k_proj.bias",), num_layers=1
        )

    run_ranks(work, 3)
