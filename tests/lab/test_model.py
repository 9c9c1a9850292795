from pathlib import Path

import pytest
import torch

from lab.models.model import GPT, MLP, BabyCNN, GPTConfig, loss_of
from lab.models.text import global_batch

TINY = GPTConfig.named("tiny")


def tokens_of(batch: int, time: int) -> torch.Tensor:
    return torch.randint(256, (batch, time), generator=torch.Generator().manual_seed(7))


MODELS = {
    "gpt": lambda seed: GPT(TINY, seed=seed),
    "mlp": lambda seed: MLP([64, 16, 10], seed=seed),
    "cnn": lambda seed: BabyCNN(seed=seed),
}


@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS.keys())
def test_a_seed_alone_decides_the_initial_weights(build):
    torch.manual_seed(1)
    first = torch.nn.utils.parameters_to_vector(build(5).parameters())
    torch.manual_seed(2)
    again = torch.nn.utils.parameters_to_vector(build(5).parameters())
    other = torch.nn.utils.parameters_to_vector(build(6).parameters())
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_the_initial_loss_is_that_of_a_uniform_guess():
    tokens = tokens_of(8, 32)
    loss = loss_of(GPT(TINY)(tokens[:, :-1]), tokens[:, 1:])
    assert loss.item() == pytest.approx(torch.tensor(256.0).log().item(), abs=0.1)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_a_position_sees_nothing_that_comes_after_it(num_kv_heads):
    model = GPT(GPTConfig.named("tiny", num_kv_heads=num_kv_heads)).double()
    tokens = tokens_of(1, 16)
    changed = tokens.clone()
    changed[0, 8] = (changed[0, 8] + 1) % 256
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :8], after[:, :8], rtol=0, atol=1e-12)
    assert ((before - after).abs().amax(-1)[0, 8:] > 1e-9).all()


def test_a_tied_head_shares_the_embedding():
    model = GPT(TINY)
    assert model.head.weight is model.token_embedding.weight


def test_grouped_queries_equal_full_attention_with_repeated_key_and_value_heads():
    grouped = GPT(GPTConfig.named("tiny", num_kv_heads=2)).double()
    full = GPT(TINY).double()
    weights = grouped.state_dict()
    for name, value in weights.items():
        if "k_proj" in name or "v_proj" in name:
            weights[name] = value.unflatten(0, (2, -1)).repeat_interleave(2, dim=0).flatten(0, 1)
    full.load_state_dict(weights)
    torch.testing.assert_close(grouped(tokens_of(2, 16)), full(tokens_of(2, 16)))


def test_attention_is_right_where_a_rank_holds_only_some_of_the_heads():
    whole = GPT(TINY).double().blocks[0].attention
    x_btd = torch.randn(2, 8, 32, dtype=torch.float64)
    expected = whole(x_btd)
    total = torch.zeros_like(expected)
    for half in (slice(0, 16), slice(16, 32)):
        part = GPT(TINY).double().blocks[0].attention
        for name in ("q_proj", "k_proj", "v_proj"):
            linear, source = getattr(part, name), getattr(whole, name)
            linear.weight.data, linear.bias.data = source.weight.data[half], source.bias.data[half]
        part.o_proj.weight.data = whole.o_proj.weight.data[:, half]
        part.o_proj.bias.data.zero_()
        total += part(x_btd)
    torch.testing.assert_close(total + whole.o_proj.bias, expected)


def test_a_tiny_gpt_learns_python():
    model = GPT(TINY)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    corpus = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8)
    losses = []
    for step in range(40):
        x_bt, y_bt = global_batch(corpus, seed=0, step=step, batch_size=16, block_size=32)
        loss = loss_of(model(x_bt), y_bt)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: GPTConfig(width=30, num_heads=4), "width 30 .* multiple of the 4 heads"),
        (lambda: GPTConfig(num_heads=4, num_kv_heads=3), "num_kv_heads 3 must divide the 4"),
        (lambda: GPTConfig(num_heads=4, num_kv_heads=0), "num_kv_heads 0 must divide the 4"),
        (lambda: GPTConfig.named("huge"), "no GPT size 'huge': choose one of tiny, small, 24heads, 8layers"),
        (lambda: GPT(TINY)(tokens_of(1, 33)), "33 tokens in a row exceed block_size 32"),
        (lambda: BabyCNN(image_size=32), "8x8 or 28x28 pixels, not 32x32"),
    ],
)
def test_an_impossible_size_is_refused_in_a_sentence(build, words):
    with pytest.raises(ValueError, match=words):
        build()


@pytest.mark.parametrize("image_size", [8, 28])
def test_the_cnn_takes_both_image_sizes_in_either_precision(image_size):
    images = torch.rand(3, 1, image_size, image_size)
    model = BabyCNN(image_size, num_classes=7)
    single, double = model(images), model.double()(images.double())
    assert single.shape == (3, 7)
    assert double.dtype == torch.float64
    torch.testing.assert_close(single, double.float())
