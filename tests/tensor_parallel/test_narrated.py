"""Tell, in one straight line for each technique, why tensor-parallel training equals one process.

The matrix of models, ranks and options stands in tests/test_wrappers.py.
"""

from copy import deepcopy

import torch
import torch.nn.functional as F
from torch import nn

from comm.collectives import all_gather, all_reduce
from lab.cluster import Cluster
from tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from tests.on_ranks import on_ranks


@on_ranks(3)
def test_tensor_parallel_equals_one_process(cluster: Cluster):
    rank = cluster.rank

    # One process computes an MLP with 6 hidden features.
    torch.manual_seed(0)
    up, down = nn.Linear(4, 6).double(), nn.Linear(6, 5).double()
    x, target = torch.randn(7, 4).double().requires_grad_(), torch.randn(7, 5).double()
    expected = down(F.gelu(up(x)))
    F.mse_loss(expected, target).backward()

    # A rank holds two hidden features: two columns of the first matrix, two rows of the second. (PyTorch
    # stores a matrix transposed, so that outputs are dim 0 and inputs are dim 1.)
    own = slice(2 * rank, 2 * rank + 2)
    column, row = ColumnParallelLinear(deepcopy(up)), RowParallelLinear(deepcopy(down))
    assert torch.equal(column.weight, up.weight[own]) and torch.equal(column.bias, up.bias[own])
    assert torch.equal(row.weight, down.weight[:, own]) and torch.equal(row.bias, down.bias)

    # All ranks have the same input. GELU works on each hidden feature alone, so it needs no other rank.
    own_x = x.detach().clone().requires_grad_()
    hidden = F.gelu(column(own_x))
    assert hidden.shape == (7, 2)

    # Two hidden features make one term of each output. The all-reduce in the row layer adds the terms up.
    y = row(hidden)
    torch.testing.assert_close(y, expected, rtol=1e-9, atol=1e-12)

    # Every rank computes the same loss, so the gradient of y is complete everywhere: the backward of that
    # sum is the identity. Another sum would make all gradients n times too large.
    F.mse_loss(y, target).backward()
    torch.testing.assert_close(row.weight.grad, down.weight.grad[:, own], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(row.bias.grad, down.bias.grad, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(column.weight.grad, up.weight.grad[own], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(column.bias.grad, up.bias.grad[own], rtol=1e-9, atol=1e-12)

    # The input went into all hidden features, and a rank computes the gradient that comes from two of
    # them. The backward of the column layer has added the ranks' terms up.
    torch.testing.assert_close(own_x.grad, x.grad, rtol=1e-9, atol=1e-12)


@on_ranks(2)
def test_sequence_parallel_equals_one_process(cluster: Cluster):
    rank = cluster.rank

    # One process computes a norm and an MLP on 1 text of 6 tokens.
    torch.manual_seed(0)
    norm = nn.LayerNorm(4).double()
    up, down = nn.Linear(4, 6).double(), nn.Linear(6, 4).double()
    x, target = torch.randn(1, 6, 4).double(), torch.randn(1, 6, 4).double()
    expected = down(F.gelu(up(norm(x))))
    ((expected - target) ** 2).sum().backward()

    # Two ranks divide the MLP by hidden features, and everything outside of it by tokens.
    own, own_tokens = slice(3 * rank, 3 * rank + 3), slice(3 * rank, 3 * rank + 3)
    own_norm = nn.LayerNorm(4).double()
    column = ColumnParallelLinear(deepcopy(up), sequence_parallel=True)
    row = RowParallelLinear(deepcopy(down), sequence_parallel=True)

    # A rank normalises 3 tokens, and so keeps half of the activations.
    normalised = own_norm(x[:, own_tokens])

    # The MLP needs all tokens: the column layer gathers them, the row layer adds up and scatters them.
    hidden = F.gelu(column(normalised))
    assert hidden.shape == (1, 6, 3)
    y = row(hidden)
    torch.testing.assert_close(y, expected[:, own_tokens], rtol=1e-9, atol=1e-12)

    # Each rank has the loss of its own tokens. In the backward the row layer gathers the gradients of all
    # tokens, so a shard of a weight gets its complete gradient.
    ((y - target[:, own_tokens]) ** 2).sum().backward()
    torch.testing.assert_close(row.weight.grad, down.weight.grad[:, own], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(column.weight.grad, up.weight.grad[own], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(column.bias.grad, up.bias.grad[own], rtol=1e-9, atol=1e-12)

    # The norm and the row layer's bias are on every rank, and have seen 3 of 6 tokens. After the backward
    # their gradients are added up over the ranks.
    for parameter, full in (
        (own_norm.weight, norm.weight),
        (own_norm.bias, norm.bias),
        (row.bias, down.bias),
    ):
        assert not torch.allclose(parameter.grad, full.grad)
        all_reduce(parameter.grad)
        torch.testing.assert_close(parameter.grad, full.grad, rtol=1e-9, atol=1e-12)


@on_ranks(3)
def test_vocabulary_parallel_equals_one_process(cluster: Cluster):
    rank = cluster.rank

    # One process embeds 5 tokens of a vocabulary of 6, and predicts the tokens that follow.
    torch.manual_seed(0)
    embedding, head = nn.Embedding(6, 4).double(), nn.Linear(4, 6, bias=False).double()
    tokens, targets = torch.tensor([0, 5, 3, 3, 1]), torch.tensor([5, 3, 3, 1, 2])
    expected = F.cross_entropy(head(embedding(tokens)), targets)
    expected.backward()

    # A rank holds 2 entries of the vocabulary, in the embedding and in the head.
    own = slice(2 * rank, 2 * rank + 2)
    own_embedding = VocabParallelEmbedding(deepcopy(embedding))
    own_head = ColumnParallelLinear(deepcopy(head))
    assert torch.equal(own_embedding.weight, embedding.weight[own])
    assert torch.equal(own_head.weight, head.weight[own])

    # A token's vector is on one rank. The others look up zeros, and the sum over ranks is the vector.
    x = own_embedding(tokens)
    torch.testing.assert_close(x, embedding(tokens), rtol=1e-9, atol=1e-12)

    # A rank has 2 of the 6 logits of each token. The loss needs a maximum, a sum of exponentials and the
    # target's logit: three numbers for each token, reduced over the ranks. No rank sees all logits.
    logits = own_head(x)
    assert logits.shape == (5, 2)
    loss = vocab_parallel_cross_entropy(logits, targets)
    torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-12)

    # The gradient of a logit is its probability, less 1 at the target: each rank knows its own.
    loss.backward()
    for shard, full in ((own_embedding.weight, embedding.weight), (own_head.weight, head.weight)):
        torch.testing.assert_close(shard.grad, full.grad[own], rtol=1e-9, atol=1e-12)

    # Put together, the shards are the full gradient of one process.
    gathered = torch.empty_like(head.weight.grad)
    all_gather(gathered, own_head.weight.grad)
    torch.testing.assert_close(gathered, head.weight.grad, rtol=1e-9, atol=1e-12)
