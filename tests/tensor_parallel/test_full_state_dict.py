"""Test that a plain model, and any number of ranks, load the state that a tensor parallel model saves."""

import torch
from torch import Tensor, nn

from lab.check import assert_same, parameters
from lab.cluster import Cluster
from lab.models.model import MLP
from lab.ranks import run_ranks
from tensor_parallel.parallelize import parallelize
from tests.tensor_parallel.equivalence import full_tensors, gathered, gpt, text


def trained(cluster: Cluster, tied: bool, sequence_parallel: bool) -> tuple[dict[str, Tensor], Tensor]:
    """Return the state after two steps, and the logits of the text."""
    model = parallelize(gpt(cluster.rank, tied=tied), None, sequence_parallel)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    x, y = text()
    for _ in range(2):
        optimizer.zero_grad()
        model.loss(model(x), y).backward()
        model.finish_gradient_sync()
        optimizer.step()
    return model.full_state_dict(), gathered(model(x), -1)[..., :61]


def loads(cluster: Cluster, state: dict[str, Tensor], logits: Tensor, tied: bool, by_tokens: bool) -> None:
    """Load the state into a model with other weights; compare logits and next steps with the plain model."""
    model, plain = parallelize(gpt(5, tied=tied), None, by_tokens), gpt(6, tied=tied)
    model.load_full_state_dict(state)
    plain.load_state_dict(state)
    x, y = text()
    assert_same({"logits": gathered(model(x), -1)[..., :61]}, {"logits": logits}, what="output")
    assert_same(model.full_state_dict(), state, 0, "saved again, it")
    for each, loss in ((model, lambda: model.loss(model(x), y)), (plain, lambda: loss_of_plain(plain, x, y))):
        loss().backward()
        if each is model:
            model.finish_gradient_sync()
        torch.optim.SGD(each.parameters(), lr=0.3).step()
    assert_same(
        full_tensors(model, parameters(model.module)), parameters(plain), what="parameter after loading"
    )


def loss_of_plain(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())


def test_a_state_saved_by_four_ranks_is_loaded_by_one_process_and_by_one_and_three_ranks():
    cases = [(tied, by_tokens) for tied in (True, False) for by_tokens in (False, True)]

    def save_all(cluster: Cluster) -> list[tuple[dict[str, Tensor], Tensor]]:
        return [trained(cluster, *case) for case in cases]

    def load_all(cluster: Cluster, saved: list[tuple[dict[str, Tensor], Tensor]]) -> None:
        for (tied, by_tokens), (state, logits) in zip(cases, saved, strict=True):
            loads(cluster, state, logits, tied, by_tokens)

    first, *others = run_ranks(save_all, 4)
    for other in others:
        for (state, _), (same, _) in zip(first, other, strict=True):
            assert_same(same, state, 0, "on another rank, it")
    for (tied, _), (state, logits) in zip(cases, first, strict=True):
        plain = gpt(1, tied=tied)
        plain.load_state_dict(state)
        assert_same({"logits": plain(text()[0]).detach()}, {"logits": logits}, what="output")
    run_ranks(load_all, 3, first)
    run_ranks(load_all, 1, [first[i] for i in (1, 0, 3, 2)])  # in the other mode


def test_a_full_state_dict_is_a_copy_with_the_names_and_shapes_of_the_plain_model():
    def look(cluster: Cluster) -> None:
        for plain, same in ((gpt(), gpt()), (MLP([7, 12, 5, 12]).double(), MLP([7, 12, 5, 12]).double())):
            model = parallelize(plain)
            state = model.full_state_dict()
            assert_same(state, same.state_dict(), 0, "entry")
            for parameter in model.parameters():
                parameter.data.zero_()
            assert_same(state, same.state_dict(), 0, "entry")
            model.load_full_state_dict(state)
            assert_same(model.full_state_dict(), same.state_dict(), 0, "entry")

    run_ranks(look, 3)
