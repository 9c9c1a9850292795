"""Gradients are too small by the number of ranks: with SGD training is slow, and Adam hides the error."""

import torch

TARGET = "comm.algorithms.reduction.divide_if_mean"
KILLER = "tests.comm.test_collectives_by_hand.test_a_mean_is_divided_by_the_number_of_ranks_once"
CAUSE = "divided by 3 once too often"
SYMPTOM = "With SGD training on many ranks is slow, and with Adam the loss looks normal."


def mutant(op: str, reduced: torch.Tensor, ranks: int) -> None:
    if op == "mean":
        reduced.div_(ranks)
        reduced.div_(ranks)
