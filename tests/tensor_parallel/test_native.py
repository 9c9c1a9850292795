"""Test what PyTorch's DTensors send, and what they refuse. tests/test_wrappers.py trains them."""

from typing import Any

import pytest
from torch import Tensor
from torch.distributed.tensor.parallel import loss_parallel

from lab.check import assert_same, gradients
from lab.cluster import Cluster
from lab.models.model import loss_of
from lab.ranks import RankError, run_ranks
from lab.trace.ledger import LEDGER
from tensor_parallel.train_dtensor import DTensorGPT, by_comm
from tests.dtensors import full_tensors
from tests.tensor_parallel.equivalence import gpt, text


def one_backward(model: DTensorGPT, x: Tensor, y: Tensor) -> Any:
    with loss_parallel():
        loss: Any = loss_of(model(x), y)  # a DTensor
        loss.backward()
    return loss.detach().full_tensor()


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
