"""The validation loss depends on the number of ranks: rank 0 reports the mean over its own slice only."""

import torch

TARGET = "training.evaluation.held_out_means"
KILLER = "tests.training.test_evaluation.test_all_ranks_report_the_means_over_the_examples_of_all_ranks"
CAUSE = "one rank's part only"


def mutant(batches, sums, tokens: int, device: torch.device, pattern: str) -> tuple[float, float]:
    total, counted = torch.zeros(2, dtype=torch.float64, device=device), 0
    for x, y, counts in batches:
        mine = sums(x, y, counts)
        if mine is not None:
            total += mine
            counted += int(counts.sum()) * y.shape[1:].numel()
    loss, right = (total / max(counted, 1)).tolist()
    return loss, right
