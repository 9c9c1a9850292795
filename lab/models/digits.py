"""Load handwritten digits of 8x8 pixels, whose source is in lab/models/data/README.md.

Shapes by suffix: n images, c channels (one), h and w pixels.
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

FILE = Path(__file__).parent / "data" / "digits.npz"
NUM_TRAIN = 1500


def load_digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (train_images_nchw, train_labels_n, test_images_nchw, test_labels_n), always the same split.

    Images are float32 from 0 (paper) to 1 (ink), and labels are int64 from 0 to 9. The 297 test images are
    mostly by other writers than the training images.
    """
    with np.load(FILE, allow_pickle=False) as data:
        images_nchw = torch.from_numpy(data["images"]).unsqueeze(1).float() / 16
        labels_n = torch.from_numpy(data["labels"]).long()
    return images_nchw[:NUM_TRAIN], labels_n[:NUM_TRAIN], images_nchw[NUM_TRAIN:], labels_n[NUM_TRAIN:]
