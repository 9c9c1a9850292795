import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lab.trace.memory import live_bytes, saved_activations


def test_a_storage_counts_once_however_many_tensors_look_at_it():
    whole = torch.zeros(1000)
    views = [whole[:10], whole.view(10, 100).t(), whole.detach(), nn.Parameter(whole)]
    assert live_bytes({"mine": [whole, *views]})["mine"] == 4000
    assert live_bytes({"mine": views[:1]})["mine"] == 4000  # what a small view keeps alive
    assert live_bytes({"first": views, "second": [whole]})["second"] == 0


def forward_bytes(model: nn.Module, forward, x: Tensor) -> int:
    with saved_activations(model.parameters) as saved:
        loss = forward(x).square().sum()
    loss.backward()
    return saved.bytes


def test_what_autograd_saves_is_counted_without_the_parameters_and_of_a_recomputed_block_its_input_only():
    layer, x = nn.Linear(10, 20), torch.zeros(3, 10)
    assert forward_bytes(layer, layer, x) == 4 * (3 * 10 + 3 * 20)  # its input, and the square's
    # The weight is saved as well where the input needs a gradient.
    assert forward_bytes(layer, layer, x.requires_grad_()) == 4 * (3 * 10 + 3 * 20)
    layers = nn.Sequential(*(nn.Linear(10, 10) for _ in range(9)))
    assert forward_bytes(layers, layers, x) == 10 * 4 * 30
    assert forward_bytes(layers, lambda x: checkpoint(layers, x, use_reentrant=False), x) == 2 * 4 * 30
