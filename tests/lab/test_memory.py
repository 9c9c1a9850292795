import gc

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from lab.cluster import Cluster
from lab.ranks import run_ranks
from lab.trace.memory import live_bytes, saved_activations


def other() -> int:
    return live_bytes({})["other"]


def test_a_storage_counts_once_however_many_tensors_look_at_it():
    whole = torch.zeros(1000)
    views = [whole[:10], whole.view(10, 100).t(), whole.detach(), nn.Parameter(whole)]
    assert live_bytes({"mine": [whole, *views]})["mine"] == 4000
    assert live_bytes({"mine": views[:1]})["mine"] == 4000  # what a small view keeps alive
    assert live_bytes({"first": views, "second": [whole]})["second"] == 0


def test_different_tensors_add_up_in_bytes_of_their_dtypes():
    mine = [torch.zeros(10, dtype=dtype) for dtype in (torch.float64, torch.bfloat16, torch.bool)]
    assert live_bytes({"mine": [*mine, None]})["mine"] == 80 + 20 + 10


def test_a_freed_storage_counts_nothing():
    tensor = torch.zeros(1000)
    tensor.untyped_storage().resize_(0)
    assert live_bytes({"mine": [tensor]})["mine"] == 0


def test_meta_tensors_have_no_memory():
    before = other()
    kept = torch.zeros(1000, device="meta")
    assert live_bytes({"mine": [kept]})["mine"] == 0
    assert other() == before


class Hiding(nn.Module):
    """A linear layer with a buffer that is not registered."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(10, 10)
        self._hidden = {"buckets": [torch.zeros(12345)]}


def test_a_buffer_of_no_class_counts_as_other():
    before = other()
    model = Hiding()
    sizes = live_bytes({"parameters": model.parameters()})
    assert sizes == {"parameters": 440, "other": before + 4 * 12345}
    model._hidden.clear()
    assert live_bytes({"parameters": model.parameters()})["other"] == before


def test_a_gradient_of_no_class_counts_as_other():
    before = other()
    layer = nn.Linear(10, 10)
    layer(torch.zeros(1, 10)).sum().backward()
    assert live_bytes({"parameters": layer.parameters()})["other"] == before + 440
    gradients = [p.grad for p in layer.parameters()]
    sizes = live_bytes({"parameters": layer.parameters(), "gradients": gradients})
    assert sizes == {"parameters": 440, "gradients": 440, "other": before}


def test_garbage_in_cycles_does_not_count():
    before = other()
    gc.disable()
    try:
        cycle: list = [torch.zeros(1000)]
        cycle.append(cycle)
        del cycle
        assert other() == before
    finally:
        gc.enable()


def test_a_class_may_not_be_called_other():
    with pytest.raises(ValueError, match="give yours another name"):
        live_bytes({"other": []})


def test_a_dtensor_stands_for_the_part_that_this_rank_holds():
    def work(cluster: Cluster) -> None:
        mesh = init_device_mesh("cpu", (cluster.world_size,))
        before = other()
        tensor = nn.Parameter(distribute_tensor(torch.zeros(4, 7), mesh, [Shard(0)]))
        assert live_bytes({"mine": [tensor]}) == {"mine": 2 * 7 * 4, "other": before}

    run_ranks(work, 2)


def forward_bytes(model: nn.Module, x: Tensor) -> int:
    with saved_activations(model.parameters) as saved:
        loss = model(x).square().sum()
    loss.backward()
    return saved.bytes


def test_what_autograd_saves_is_counted_without_the_parameters():
    x = torch.zeros(3, 10)
    assert forward_bytes(nn.Linear(10, 20), x) == 4 * (3 * 10 + 3 * 20)  # its input, and the square's
    # The weight is saved as well where the input needs a gradient.
    assert forward_bytes(nn.Linear(10, 20), x.requires_grad_()) == 4 * (3 * 10 + 3 * 20)


def test_a_tensor_that_two_operations_save_counts_once():
    x = torch.zeros(100, requires_grad=True)
    with saved_activations(list) as saved:
        y = x.exp()  # saves its output
        (y * y).sum()  # saves it twice
    assert saved.bytes == 400


def test_storages_that_are_gone_are_not_mistaken_for_later_ones():
    x = torch.zeros(100, requires_grad=True)
    with saved_activations(list) as saved:
        for _ in range(5):
            x.exp()  # its graph dies at once, and the next one is given the same memory
    assert saved.bytes == 5 * 400


def test_only_what_is_saved_in_the_block_counts():
    x = torch.zeros(100, requires_grad=True)
    y = x.exp()
    with saved_activations(list) as saved:
        z = y.sin()
    z.exp()
    assert saved.bytes == 400


def test_gradients_are_the_same_while_counting():
    x, layer = torch.randn(3, 10), nn.Linear(10, 20)
    layer(x).square().sum().backward()
    expected, layer.weight.grad = layer.weight.grad, None
    forward_bytes(layer, x)
    assert torch.equal(layer.weight.grad, expected)


class Recomputing(nn.Module):
    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.layers, x, use_reentrant=False)


def test_a_block_that_is_recomputed_keeps_its_input_only():
    layers, x = nn.Sequential(*(nn.Linear(10, 10) for _ in range(9))), torch.zeros(3, 10, requires_grad=True)
    assert forward_bytes(layers, x) == 10 * 4 * 30
    assert forward_bytes(Recomputing(layers), x) == 2 * 4 * 30


class Gathering(nn.Module):
    """A layer whose weight is full only during the forward, as in a sharded model."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, 10))

    def forward(self, x: Tensor) -> Tensor:
        shard, self.weight = self.weight, nn.Parameter(torch.zeros(20, 10))
        y = F.linear(x, self.weight)
        self.weight = shard
        return y


def test_a_gathered_parameter_is_no_activation():
    assert forward_bytes(Gathering(), torch.zeros(3, 10, requires_grad=True)) == 4 * (3 * 10 + 3 * 20)
