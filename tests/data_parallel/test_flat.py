"""Test the layout of parameters in one flat tensor, on numbers that a reader can follow by hand."""

import torch
from torch import nn

from data_parallel.flat import Flat


def test_a_shard_may_begin_and_end_in_the_middle_of_parameters():
    parameters = [nn.Parameter(torch.empty(size)) for size in (5, 2, 4)]
    numbers = torch.arange(12.0)  # 11, and one of padding, so that three shards are equal
    expected = [
        [(0, [0, 1, 2, 3]), (0, []), (0, [])],
        [(4, [4]), (0, [5, 6]), (0, [7])],
        [(0, []), (0, []), (1, [8, 9, 10])],
    ]
    for rank in range(3):
        flat = Flat(parameters, rank, 3)
        found = flat.pieces(numbers[flat.mine])
        assert [(start, piece.tolist()) for start, piece in found] == expected[rank], f"rank {rank}"


def test_pieces_are_views_of_the_shard():
    parameters = [nn.Parameter(torch.empty(size)) for size in (5, 2, 4)]
    shard = torch.zeros(4)
    for _, piece in Flat(parameters, 1, 3).pieces(shard):
        piece += 1
    assert shard.tolist() == [1, 1, 1, 1]
