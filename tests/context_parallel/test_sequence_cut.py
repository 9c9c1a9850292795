"""Each token belongs to one rank, and each pair that may attend to one part of one rank's attention."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from context_parallel.sequence_cut import CUTS, SequenceCut, documents_of
from tests.context_parallel.equivalence import attending_pairs, documents_with_borders


def computed_pairs(
    cut: SequenceCut, ranks: int, length: int, is_causal: bool, documents: Tensor | None
) -> Tensor:
    """Return how often each pair of positions attends in all parts of all ranks, (batch or 1, time, time)."""
    count = torch.zeros(1 if documents is None else len(documents), length, length, dtype=torch.long)
    for rank in range(ranks):
        for source in range(ranks):
            for part in cut.parts(rank, source, is_causal, documents):
                queries, keys = cut.positions(rank)[part.queries], cut.positions(source)[part.keys]
                pairs = torch.ones(len(queries), len(keys), dtype=torch.bool)
                if part.is_causal:
                    assert part.mask is None
                    pairs = pairs.tril()
                if part.mask is not None:
                    pairs = part.mask[:, 0]
                    assert pairs.any(), "a part in which no pair attends"
                count[:, queries[:, None], keys[None, :]] += pairs.long()
    return count


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(sorted(CUTS)),
    st.integers(0, 24),
    st.integers(1, 6),
    st.booleans(),
    st.none() | st.lists(st.lists(st.integers(0, 24)), min_size=1, max_size=3),
)
def test_each_pair_that_may_attend_is_in_one_part_of_one_rank(name, length, ranks, is_causal, borders):
    cut = CUTS[name](length, ranks)
    documents = None if borders is None else documents_with_borders(length, *map(sorted, borders))
    count = computed_pairs(cut, ranks, length, is_causal, documents)
    assert torch.equal(count, attending_pairs(length, is_causal, documents).long())


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(sorted(CUTS)), st.integers(0, 40), st.integers(1, 6))
def test_each_token_belongs_to_one_rank(name, length, ranks):
    cut = CUTS[name](length, ranks)
    positions = [cut.positions(rank) for rank in range(ranks)]
    assert sorted(torch.cat(positions).tolist()) == list(range(length))
    assert [cut.length(rank) for rank in range(ranks)] == [len(each) for each in positions]
    full = torch.randn(2, length, 3)
    for rank, each in enumerate(positions):
        assert torch.equal(cut.own(full, rank), full[:, each])
        assert torch.equal(cut.own(full.transpose(1, 2), rank, 2), full[:, each].transpose(1, 2))
    chunks = 2 * ranks if name == "zigzag" else ranks
    lengths = [chunk.stop - chunk.start for of_rank in cut.chunks for chunk in of_rank]
    assert len(lengths) == chunks and max(lengths) - min(lengths) <= 1


def test_a_rank_has_its_piece_from_the_front_and_its_piece_from_the_back():
    zigzag, contiguous = SequenceCut.zigzag(8, 2), SequenceCut.contiguous(7, 2)
    assert [zigzag.positions(rank).tolist() for rank in range(2)] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert [contiguous.positions(rank).tolist() for rank in range(2)] == [[0, 1, 2, 3], [4, 5, 6]]


def pairs_of_steps(cut: SequenceCut, rank: int, ranks: int) -> list[float]:
    """Return how many pairs a rank computes in each step of the ring."""
    return [sum(part.pairs for part in cut.parts(rank, (rank - step) % ranks)) for step in range(ranks)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_with_the_zigzag_cut_all_ranks_compute_equally_many_pairs_in_each_step(ranks: int):
    chunk = 5
    cut = SequenceCut.zigzag(2 * ranks * chunk, ranks)
    own = 2 * chunk * (chunk + 1) // 2 + chunk**2
    for rank in range(ranks):
        assert pairs_of_steps(cut, rank, ranks) == [own] + [2 * chunk**2] * (ranks - 1)


def test_with_contiguous_pieces_the_last_rank_computes_2n_1_times_as_much_as_the_first():
    chunk, ranks = 1000, 4
    cut = SequenceCut.contiguous(ranks * chunk, ranks)
    first, last = (pairs_of_steps(cut, rank, ranks) for rank in (0, ranks - 1))
    assert first == [chunk * (chunk + 1) / 2] + [0] * (ranks - 1)
    assert last == [chunk * (chunk + 1) / 2] + [chunk**2] * (ranks - 1)
    assert sum(last) / sum(first) == pytest.approx(2 * ranks - 1, rel=1e-3)


def test_documents_leave_out_the_keys_of_other_documents():
    documents = documents_with_borders(12, (6,))
    cut = SequenceCut.contiguous(12, 4)
    computed = [
        [source for source in range(4) if [*cut.parts(rank, source, True, documents)]] for rank in range(4)
    ]
    assert computed == [[0], [0, 1], [2], [2, 3]]
    [diagonal] = cut.parts(1, 1, True, documents)
    [below] = cut.parts(1, 0, True, documents)
    assert diagonal.is_causal and diagonal.mask is None and below.mask is None, "no border needs no mask"


def test_a_document_begins_after_an_empty_line():
    tokens = torch.tensor([list(b"\n\na\n\n\nbc\nd\n\ne")])
    assert documents_of(tokens).tolist() == [[0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 3]]
    both = torch.tensor([list(b"ab\n\ncd"), list(b"\n\n\n\nab")])
    assert documents_of(both).tolist() == [[0, 0, 0, 0, 1, 1], [0, 0, 0, 0, 1, 1]]
