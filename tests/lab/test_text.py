import pytest
import torch

from lab.launch.errors import WorkbookError
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
