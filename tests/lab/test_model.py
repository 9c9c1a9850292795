import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from hybrid_parallel.planner.shapes import ModelShape, flops_per_token
from lab.models.digits import load_digits
from lab.models.model import GPT, MLP, BabyCNN, GPTConfig, loss_of

TINY = GPTConfig.named("tiny")


def tokens_of(batch: int, time: int) -> torch.Tensor:
    return torch.randint(256, (batch, time), generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize(
    "build",
    [lambda seed: GPT(TINY, seed), lambda seed: MLP([64, 16, 10], seed), lambda seed: BabyCNN(seed=seed)],
)
def test_a_seed_alone_decides_the_initial_weights(build):
    torch.manual_seed(1)
    first = torch.nn.utils.parameters_to_vector(build(5).parameters())
    torch.manual_seed(2)
    assert torch.equal(torch.nn.utils.parameters_to_vector(build(5).parameters()), first)
    assert not torch.equal(torch.nn.utils.parameters_to_vector(build(6).parameters()), first)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_a_position_sees_nothing_that_comes_after_it(num_kv_heads):
    model = GPT(GPTConfig.named("tiny", num_kv_heads=num_kv_heads)).double()
    tokens = tokens_of(1, 16)
    changed = tokens.clone()
    changed[0, 8] = (changed[0, 8] + 1) % 256
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :8], after[:, :8], rtol=0, atol=1e-12)
    assert ((before - after).abs().amax(-1)[0, 8:] > 1e-9).all()


@pytest.mark.parametrize("changes", [{}, {"num_kv_heads": 2, "tied": False}])
def test_the_formula_of_operations_is_what_torch_counts(changes):
    config = GPTConfig.named("tiny", **changes)
    tokens = tokens_of(3, config.block_size)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        loss_of(GPT(config)(tokens), tokens).backward()
    assert counter.get_total_flops() == tokens.numel() * config.flops_per_token
    assert config.flops_per_token == flops_per_token(ModelShape(**vars(config)))


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: GPTConfig(width=30, num_heads=4), "width 30 .* multiple of the 4 heads"),
        (lambda: GPTConfig(num_heads=4, num_kv_heads=3), "num_kv_heads 3 must divide the 4"),
        (lambda: GPTConfig.named("huge"), "no GPT size 'huge': choose one of tiny, small, 24heads, 8layers"),
        (lambda: GPT(TINY)(tokens_of(1, 33)), "33 tokens in a row exceed block_size 32"),
    ],
)
def test_an_impossible_size_is_refused_in_a_sentence(build, words):
    with pytest.raises(ValueError, match=words):
        build()


def test_a_cnn_learns_to_read_digits_and_takes_larger_images_too():
    train_images, train_labels, test_images, test_labels = load_digits()
    assert (train_images.shape, test_images.shape) == ((1500, 1, 8, 8), (297, 1, 8, 8))
    assert (train_images.min().item(), train_images.max().item()) == (0.0, 1.0)
    model = BabyCNN()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(3):
        for images, labels in zip(train_images.split(60), train_labels.split(60), strict=True):
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
    assert (model(test_images).argmax(-1) == test_labels).float().mean() > 0.8
    assert BabyCNN(28, num_classes=7)(torch.rand(3, 1, 28, 28)).shape == (3, 7)
