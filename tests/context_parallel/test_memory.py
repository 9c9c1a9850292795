"""A rank keeps the activations of its own tokens: for n ranks about an n-th of one process's."""

import pytest
import torch

from lab.cluster import Cluster
from lab.models.model import GPT, GPTConfig, loss_of
from lab.ranks import run_ranks
from lab.trace.memory import saved_activations
from tests.context_parallel.equivalence import ALL_TO_ALL, RING, Variant

RANKS, LENGTH, MOST = 4, 8192, 0.30
CONFIG = GPTConfig(vocab_size=32, block_size=LENGTH, num_layers=2, num_heads=4, width=16)


@pytest.fixture(scope="module")
def kept_by_one_process() -> int:
    """Return the bytes of activations that autograd keeps in the forward of the plain model."""
    model, tokens = GPT(CONFIG), torch.randint(32, (1, LENGTH))
    with saved_activations(model.parameters) as saved:
        loss_of(model(tokens), tokens)
    return saved.bytes


@pytest.mark.parametrize("variant", [RING, ALL_TO_ALL], ids=["ring", "all_to_all"])
def test_four_ranks_keep_at_most_0_30_of_one_processs_activations(variant: Variant, kept_by_one_process: int):
    def work(cluster: Cluster) -> int:
        model, tokens = variant.wrap(GPT(CONFIG)), torch.randint(32, (1, LENGTH))
        with saved_activations(model.parameters) as saved:
            model.loss(model(tokens), tokens)
        return saved.bytes

    for kept in run_ranks(work, RANKS):
        assert kept_by_one_process / RANKS * 0.9 < kept <= MOST * kept_by_one_process
