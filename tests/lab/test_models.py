"""The models, and the batches of text and digits on which they are trained."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from hybrid_parallel.planner.shapes import ModelShape, flops_per_token
from lab.check import assert_same, gradients
from lab.launch.errors import WorkbookError
from lab.models.blocks import recompute_blocks
from lab.models.digits import load_digits
from lab.models.model import GPT, MLP, BabyCNN, GPTConfig, loss_of
from lab.models.text import global_batch, load_corpus, microbatches, rank_slice, split

TEXT = torch.arange(200, dtype=torch.uint8)


def test_the_corpus_is_one_to_two_megabytes_of_the_standard_library_and_its_end_is_for_validation():
    corpus = load_corpus()
    assert corpus.dtype == torch.uint8 and 1_000_000 < len(corpus) < 2_100_000
    assert b"class OrderedDict(dict):" in corpus.numpy().tobytes()
    train, validation = split(TEXT)
    assert torch.equal(torch.cat([train, validation]), TEXT) and len(validation) == 10


def test_a_batch_depends_on_seed_and_step_alone_and_its_targets_are_one_byte_further_on():
    torch.manual_seed(0)
    x_bt, y_bt = global_batch(TEXT, seed=1, step=2, batch_size=8, block_size=4)
    assert x_bt.shape == y_bt.shape == (8, 4) and x_bt.dtype == y_bt.dtype == torch.int64
    assert torch.equal(y_bt, x_bt + 1), "TEXT counts up, so its next byte is one more"
    torch.manual_seed(9)
    state = torch.get_rng_state()
    assert torch.equal(global_batch(TEXT, seed=1, step=2, batch_size=8, block_size=4)[0], x_bt)
    assert torch.equal(torch.get_rng_state(), state)
    for seed, step in ((1, 3), (2, 2), (2, 1), (0, 3)):
        assert not torch.equal(global_batch(TEXT, seed, step, batch_size=8, block_size=4)[0], x_bt)


def test_the_slices_of_all_ranks_in_order_are_the_global_batch_and_so_are_microbatches():
    x_bt, y_bt = global_batch(TEXT, seed=0, step=0, batch_size=12, block_size=8)
    for world_size in (1, 2, 3, 4):
        slices = [rank_slice(x_bt, rank, world_size) for rank in range(world_size)]
        assert {len(part) for part in slices} == {12 // world_size}
        assert torch.equal(torch.cat(slices), x_bt)
    parts = microbatches(x_bt, y_bt, 3)
    assert torch.equal(torch.cat([x for x, _ in parts]), x_bt)
    assert torch.equal(torch.cat([y for _, y in parts]), y_bt)


def test_a_batch_that_does_not_divide_and_a_corpus_that_is_too_short_are_refused():
    with pytest.raises(WorkbookError, match=r"of 10 equally: .* multiple of 4, such as --batch-size 12"):
        rank_slice(TEXT[:10], rank=0, world_size=4)
    with pytest.raises(WorkbookError, match="block size of 200 needs a longer corpus than 200 bytes"):
        global_batch(TEXT, seed=0, step=0, batch_size=1, block_size=200)


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


class Average(nn.Module):
    """Has buffers that each forward changes, and its output depends on: one is replaced, one written to."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        self.count = self.count + 1
        self.mean.mul_(0.5).add_(y.detach().mean(0))
        return y * (self.count + self.mean.clone())


def test_recomputation_changes_neither_the_gradients_nor_the_buffers():
    found = []
    for recompute in (False, True):
        torch.manual_seed(0)
        norms = nn.BatchNorm1d(4), nn.BatchNorm1d(4, momentum=None)
        spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
        blocks = [nn.Sequential(nn.Linear(4, 4), norm, nn.Dropout(0.3), nn.Tanh()) for norm in norms]
        model = nn.Sequential(nn.Sequential(*blocks, Average(), spectral, nn.Linear(4, 4)).double())
        if recompute:
            recompute_blocks(model)
        losses = [model(x).square().sum() for x in torch.randn(3, 6, 4, dtype=torch.float64)]
        for loss in losses:
            loss.backward()
        found.append(gradients(model) | dict(model.named_buffers()))
    assert_same(found[1], found[0], 0, "gradient or buffer")
