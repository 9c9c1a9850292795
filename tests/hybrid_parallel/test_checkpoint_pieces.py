"""Any mesh finds its elements in what any other mesh has saved, and elements that are nowhere are named."""

import math
import tempfile
from itertools import pairwise
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_parallel import checkpoint_folder as files
from hybrid_parallel import checkpoint_reading as reading
from hybrid_parallel.checkpoint_pieces import Box, Line, Part, Piece
from tests.hybrid_parallel.checkpoint_toys import full, pieces_of, refusal, written

SHAPES = st.lists(st.integers(1, 5), max_size=3).map(tuple)


@st.composite
def divisions(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Part]:
    """Cut a tensor into boxes by a grid, and each box into ranges; some of them are empty."""
    boxes: list[Box] = [()]
    for size in shape:
        cuts = sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))})
        boxes = [(*box, cut) for box in boxes for cut in pairwise(cuts)]
    parts = []
    for box in boxes:
        numel = math.prod(end - first for first, end in box)
        cuts = sorted([0, numel, *draw(st.lists(st.integers(0, numel), max_size=2))])
        parts += [Part("model/x", shape, box, start, end - start) for start, end in pairwise(cuts)]
    return parts


def elements(part: Part, whole: torch.Tensor) -> torch.Tensor:
    """Return the elements that a part names, by slicing."""
    boxed = whole[tuple(slice(*extent) for extent in part.box)]
    return boxed.reshape(-1)[part.start : part.start + part.numel].clone()


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_any_division_of_a_tensor_is_read_from_any_other_and_every_bit_is_right(data):
    shape = data.draw(SHAPES)
    whole = torch.randn(shape, dtype=torch.float64)
    saved, wanted = data.draw(divisions(shape)), data.draw(divisions(shape))
    ranks = [
        [Piece(part.name, elements(part, whole), shape, part.box, part.start)]
        for part in dict.fromkeys(saved)
    ]
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.multiple(files, BLOCK=24, sync=lambda path: None),
    ):
        manifest = written(Path(folder), ranks)
        for part in wanted:
            target = torch.full((part.numel,), math.nan, dtype=torch.float64)
            piece = Piece(part.name, target, shape, part.box, part.start)
            reading.fill(files.folder_of(Path(folder), 0), manifest, [piece])
            assert torch.equal(target, elements(part, whole))


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_the_runs_of_a_part_are_its_elements_in_the_full_tensor(data):
    shape = data.draw(SHAPES)
    numbers = torch.arange(math.prod(shape)).view(shape)
    for part in data.draw(divisions(shape)):
        runs = part.runs()
        assert [n for begin, end, _ in runs for n in range(begin, end)] == elements(part, numbers).tolist()
        assert [place for *_, place in runs] == [
            sum(end - begin for begin, end, _ in runs[:i]) for i in range(len(runs))
        ]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_part_that_is_left_out_or_saved_twice_is_refused(data):
    shape = data.draw(SHAPES)
    parts = [part for part in data.draw(divisions(shape)) if part.numel]
    one = data.draw(st.sampled_from(parts))
    assert "of model/x are missing: no rank has saved" in refusal(
        Line, "model/x", shape, [part for part in parts if part is not one]
    )
    assert "of model/x are saved twice" in refusal(Line, "model/x", shape, [*parts, one])


def test_missing_and_overlapping_elements_are_named_and_nothing_becomes_visible(tmp_path):
    x = torch.zeros(10)
    for ends, sentence in (
        ((4, 6), "elements 4 to 5 of model/x are missing: no rank has saved them"),
        ((6, 4), "elements 4 to 5 of model/x are saved twice, also in model/x [0:10], elements 4:10"),
    ):
        ranks = [
            [Piece("model/x", x[: ends[0]], (10,))],
            [Piece("model/x", x[ends[1] :], (10,), start=ends[1])],
        ]
        assert sentence in refusal(written, tmp_path, ranks)
        assert files.complete_steps(tmp_path) == []


def test_equal_parts_of_two_ranks_count_once_and_unequal_ones_are_refused(tmp_path):
    x, shape = torch.randn(3), (3,)
    manifest = written(tmp_path, [[Piece("model/x", x, shape)], [Piece("model/x", x, shape)]])
    assert [saved.rank for saved in manifest.parts] == [0]
    said = refusal(written, tmp_path, [[Piece("model/x", x, shape)], [Piece("model/x", x + 1, shape)]])
    assert said == "rank 0 and rank 1 have different numbers as model/x [0:3], elements 0:3"


@pytest.mark.parametrize("other", [torch.zeros(2, 5), torch.zeros(10, dtype=torch.float64)])
def test_parts_of_different_shapes_or_dtypes_are_refused(tmp_path, other):
    shape = tuple(other.shape)
    ranks = [
        [Piece("model/x", torch.zeros(10)[:5], (10,))],
        [Piece("model/x", other.view(-1)[5:], shape, start=5)],
    ]
    assert "with different shapes or dtypes" in refusal(written, tmp_path, ranks)


def test_only_the_blocks_with_wanted_elements_are_read(tmp_path):
    x = torch.randn(1000)
    with mock.patch.object(files, "BLOCK", 400):
        manifest = written(tmp_path, [[Piece("model/x", x, (1000,))]])
    target = torch.zeros(50)
    with mock.patch.object(reading.zlib, "crc32", side_effect=reading.zlib.crc32) as checked:
        reading.fill(tmp_path / "step-0", manifest, [Piece("model/x", target, (1000,), start=120)])
    assert torch.equal(target, x[120:170])
    assert [len(call.args[0]) for call in checked.call_args_list] == [400]


def test_a_part_that_lies_outside_its_tensor_is_a_value_error():
    for box, start, numel in (
        (((0, 11),), 0, 1),
        (((2, 4),), 1, 2),
        (((0, 10), (0, 1)), 0, 1),
        (((0, 9),), -1, 1),
    ):
        with pytest.raises(ValueError, match="is no part of a tensor of shape"):
            Part("model/x", (10,), box, start, numel)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int64, torch.bool])
def test_every_dtype_keeps_its_bits(tmp_path, dtype):
    x = torch.randn(7, 3).to(dtype)
    manifest = written(
        tmp_path,
        [
            [Piece("model/x", x[:3], (7, 3), ((0, 3), (0, 3)))],
            [Piece("model/x", x[3:], (7, 3), ((3, 7), (0, 3)))],
        ],
    )
    target = torch.zeros(7, 3, dtype=dtype)
    reading.fill(tmp_path / "step-0", manifest, [Piece("model/x", target, (7, 3))])
    assert torch.equal(target, x)


def test_a_tensor_that_is_not_contiguous_is_filled_in_place(tmp_path):
    ranks = [pieces_of(rank, 4, 7.0, tensor=2) for rank in range(4)]
    manifest = written(tmp_path, ranks)
    target = torch.zeros(8, 6, dtype=torch.float64).t()
    reading.fill(tmp_path / "step-0", manifest, [Piece("model/weight", target, (6, 8))])
    assert torch.equal(target, full("model/weight", 7.0))
