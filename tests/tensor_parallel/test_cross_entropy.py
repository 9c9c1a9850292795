"""Test that the cross entropy of sharded logits equals torch's of full logits, with an n-th of the memory."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lab.check import assert_same
from lab.cluster import Cluster
from lab.ranks import run_ranks
from lab.trace.memory import saved_activations
from tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from tests.on_ranks import on_ranks
from tests.tensor_parallel.equivalence import gathered


def batch(num_entries: int = 61, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return logits (3, 5, num_entries) and targets, the first and the last vocabulary entry among them."""
    random = torch.Generator().manual_seed(6)
    logits = torch.randn(3, 5, num_entries, generator=random).double() * scale
    targets = torch.randint(num_entries, (3, 5), generator=random)
    targets[0, :2] = torch.tensor([0, num_entries - 1])
    return logits, targets


def compare(cluster: Cluster, logits: Tensor, targets: Tensor, rtol: float = 1e-9, **options: Any) -> None:
    """Compare the loss and the gradient of three times the loss; padding gets no gradient."""
    n, num_entries = cluster.world_size, logits.shape[-1]
    expected = logits.detach().clone().requires_grad_()
    loss = F.cross_entropy(expected.flatten(0, -2), targets.flatten(), **options)
    (3 * loss).backward()
    padded = F.pad(logits, (0, -num_entries % n), value=12.5)
    mine = padded.tensor_split(n, -1)[cluster.rank].clone().requires_grad_()
    ours = vocab_parallel_cross_entropy(mine, targets, num_entries, **options)
    (3 * ours).backward()
    what = f"with {options}, {num_entries} entries on {n} ranks, it"
    grad = gathered(mine.grad, -1)
    assert ours.shape == () and not grad[..., num_entries:].any(), what
    actual = {"loss": ours.detach(), "gradient": grad[..., :num_entries]}
    assert_same(actual, {"loss": loss.detach(), "gradient": expected.grad}, rtol, what)


@pytest.mark.parametrize("n", [2, 3])
@on_ranks("n")
def test_loss_and_gradient_equal_torchs_for_the_full_logits(cluster: Cluster, n: int):
    for num_entries in (60, 61, 5):
        logits, targets = batch(num_entries)
        compare(cluster, logits, targets)
        compare(cluster, logits, targets, ignore_index=int(targets[1, 1]))
        targets[1:, ::2] = -100
        compare(cluster, logits, targets)


@on_ranks(4)
def test_a_rank_whose_entries_are_all_padding_has_no_probability(cluster: Cluster):
    for num_entries in (1, 2, 5, 6):  # on 4 ranks, 5 are 2 2 1 0
        compare(cluster, *batch(num_entries))


@on_ranks(3)
def test_huge_logits_do_not_overflow_wherever_the_largest_is(cluster: Cluster):
    """Subtracting another rank's maximum is the same in exact arithmetic, and overflows in floating point."""
    for rank in range(cluster.world_size):
        logits, targets = batch(6)
        logits[..., 2 * rank : 2 * rank + 2] += 1e4
        compare(cluster, logits, targets)
        compare(cluster, -logits, targets)
        compare(cluster, logits * 1e4, targets)


@on_ranks(2)
def test_bf16_logits_are_added_up_in_float32_and_get_a_bf16_gradient(cluster: Cluster):
    logits, targets = batch(61)
    logits = logits.bfloat16()
    exact = logits.float().requires_grad_()
    expected = F.cross_entropy(exact.flatten(0, -2), targets.flatten())
    expected.backward()
    mine = F.pad(logits, (0, 1)).tensor_split(2, -1)[cluster.rank].clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(mine, targets, 61)
    loss.backward()
    assert loss.dtype == torch.float32 and mine.grad.dtype == torch.bfloat16
    assert_same({"loss": loss.detach()}, {"loss": expected.detach()}, 1e-6)
    rounded = gathered(mine.grad, -1)[..., :61].float()
    assert_same({"gradient": rounded}, {"gradient": exact.grad}, 2**-8)


def test_its_peak_memory_is_one_nth_of_the_full_cross_entropys():
    tokens, num_entries = 64, 4096

    def measure(cluster: Cluster) -> tuple[int, int]:
        kept = []
        for function, width in (
            (vocab_parallel_cross_entropy, num_entries // cluster.world_size),
            (F.cross_entropy, num_entries),
        ):
            logits = torch.ones(tokens, width, requires_grad=True)
            with saved_activations(lambda: [logits]) as saved:
                function(logits, torch.arange(tokens))
            kept.append(saved.bytes)
        return kept[0], kept[1]

    for n in (2, 4):
        for ours, full in run_ranks(measure, n):
            assert full >= tokens * num_entries * 4  # the measurement is not zero
            assert ours <= 1.1 / n * full, f"{ours / full:.3f} of the full one's, on {n} ranks"


@on_ranks(2)
def test_a_target_outside_of_the_vocabulary_is_refused_on_all_ranks_unless_it_is_ignored(cluster):
    for ignored in (-100, -1, 7, 9):
        for target in (torch.tensor([3, ignored]), torch.tensor([ignored, 6])):
            compare(cluster, torch.ones(2, 7).double(), target, ignore_index=ignored)
    for target in (-1, 7, 8):
        with pytest.raises(RuntimeError, match="index -1 is out of bounds"):
            vocab_parallel_cross_entropy(torch.zeros(1, 4), torch.tensor([target]), vocab_size=7)
