import runpy

import numpy as np
import torch
import torch.nn.functional as F

from lab.models.digits import FILE, load_digits
from lab.models.model import BabyCNN


def test_the_digits_have_the_promised_shapes_and_ranges():
    train_images, train_labels, test_images, test_labels = load_digits()
    assert train_images.shape == (1500, 1, 8, 8)
    assert test_images.shape == (297, 1, 8, 8)
    for images, labels in ((train_images, train_labels), (test_images, test_labels)):
        assert images.dtype == torch.float32
        assert (images.min().item(), images.max().item()) == (0.0, 1.0)
        assert labels.dtype == torch.int64
        assert labels.unique().tolist() == list(range(10))
        assert len(images) == len(labels)


def test_the_digits_need_no_pickle():
    with np.load(FILE, allow_pickle=False) as data:
        assert {name: data[name].dtype for name in data.files} == {"images": np.uint8, "labels": np.uint8}


def test_packing_the_digits_again_gives_the_same_bytes(tmp_path):
    write_npz = runpy.run_path(str(FILE.with_name("make_digits.py")))["write_npz"]
    with np.load(FILE) as data:
        arrays = dict(data)
    copies = [tmp_path / "one.npz", tmp_path / "two.npz"]
    for copy in copies:
        write_npz(copy, arrays)
    assert copies[0].read_bytes() == copies[1].read_bytes()
    with np.load(copies[0]) as data:
        assert all(np.array_equal(data[name], array) for name, array in arrays.items())
    assert b"\x00\x00\x21\x00" in copies[0].read_bytes()[:30], "the entry is dated 1 January 1980"


def test_a_cnn_learns_to_read_them():
    train_images, train_labels, test_images, test_labels = load_digits()
    model = BabyCNN()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(3):
        for images, labels in zip(train_images.split(60), train_labels.split(60), strict=True):
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
    assert (model(test_images).argmax(-1) == test_labels).float().mean() > 0.8
