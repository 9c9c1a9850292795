"""Test that PyTorch's DTensors train lab's GPT as one process does, and send what the formula says."""

from typing import Any

import pytest
from torch import Tensor
from torch.distributed.tensor.parallel import loss_parallel

from lab.check import assert_same, gradients, parameters
from lab.cluster import Cluster
from lab.models.model import loss_of
from lab.ranks import RankError, run_ranks
from lab.trace.ledger import LEDGER
from tensor_parallel.train_dtensor import DTensorGPT, by_comm
from tests.dtensors import full_tensors
from tests.one_process import RTOL, train_both
from tests.tensor_parallel.equivalence import gpt, text


def one_backward(model: DTensorGPT, x: Tensor, y: Tensor) -> Any:
    with loss_parallel():
        loss: Any = loss_of(model(x), y)  # a DTensor
        loss.backward()
    return loss.detach().full_tensor()


def compare_with_one_process(cluster: Cluster, sequence_parallel: bool, **changes: Any) -> None:
    """Compare the loss, what train_both does, and the saved state."""
    what = f"{changes}, sequence_parallel {sequence_parallel}, {cluster.world_size} ranks"
    reference, plain = (gpt(seed, **changes).to(cluster.device) for seed in (0, cluster.rank))
    native = DTensorGPT(plain, cluster.device, sequence_parallel)
    x, y = (part.to(cluster.device) for part in text())

    def backward(step: int) -> None:
        expected = loss_of(reference(x), y)
        expected.backward()
        loss = one_backward(native, x, y)
        if step:  # without this call, full_tensor() reduces what is Partial
            native.finish_gradient_sync()
        assert_same({"loss": loss}, {"loss": expected.detach()}, RTOL, f"loss, {what},")

    train_both(reference, native.module, backward, full_tensors, what=what)
    saved = gpt(1, **changes)
    saved.load_state_dict(native.full_state_dict())
    assert_same(parameters(saved), parameters(reference), RTOL, f"parameter, {what},")


def test_every_gradient_and_parameter_equals_one_process():
    def compare(cluster: Cluster) -> None:
        compare_with_one_process(cluster, sequence_parallel=False, num_layers=1)
        compare_with_one_process(cluster, True, num_layers=1, tied=False, num_kv_heads=6)

    run_ranks(compare, 3)


def test_through_comm_it_computes_the_same_bits_and_sends_what_the_formula_says():
    def compare(cluster: Cluster, sequence_parallel: bool) -> None:
        x, y = text(16)
        native = DTensorGPT(gpt(0), cluster.device, sequence_parallel).float()
        before = LEDGER.total()
        one_backward(native, x, y)
        native.finish_gradient_sync()
        assert LEDGER.total() == before  # outside of by_comm() nothing is counted
        untouched = gradients(native.module)
        native.zero_grad()
        with by_comm():
            one_backward(native, x, y)
            native.finish_gradient_sync()
        assert LEDGER.total() - before == native.traffic(x.shape)
        assert_same(full_tensors(gradients(native.module)), full_tensors(untouched), 0)

    for sequence_parallel in (False, True):
        run_ranks(compare, 2, sequence_parallel)


def test_sizes_that_do_not_divide_are_refused_in_one_sentence():
    def heads(cluster: Cluster) -> None:
        DTensorGPT(gpt(0, num_heads=12, num_kv_heads=3), cluster.device)

    def tokens(cluster: Cluster) -> None:
        DTensorGPT(gpt(0), cluster.device, sequence_parallel=True)(text(13)[0])

    with pytest.raises(RankError, match="3 key and value heads cannot be divided among 2 ranks equally"):
        run_ranks(heads, 2)
    with pytest.raises(RankError, match="13 tokens cannot be divided among 2 ranks equally"):
        run_ranks(tokens, 2)
