"""The data that a run trains on, the held-out data that it is validated on, and a step's random numbers.

      text ("gpt")            all but the last 1/20 of the corpus   |   the last 1/20
      digits (other models)   1500 images                           |   297 images, mostly by other writers

A batch is a pure function of the seed and the step, so any number of ranks trains on the same one.

torch starts every process with the same seed: if data parallel ranks kept it, a step would have the examples
of n ranks, and the dropout masks of one. Ranks draw different numbers where they compute different things:

      data parallel      a rank has its own examples                        masks of its own
      pipeline           a rank has its own layers                          masks of its own
      tensor parallel    all ranks compute the same residual stream         one mask for all
                         a rank has its own heads, or its own tokens        tensor_parallel/parallelize.py
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from lab.models.digits import load_digits
from lab.models.model import IGNORED
from lab.models.text import global_batch, load_corpus, split
from training.valid_targets import count_valid

VALIDATION_BATCHES = 4  # of text


class TrainingData:
    """The data of `model`, "gpt", "baby_cnn" or "mlp", in batches of `batch_size` examples over all ranks."""

    def __init__(
        self, model: str, batch_size: int, seed: int, block_size: int, ignore_first: int = 0
    ) -> None:
        self._batch_size, self._seed, self._block_size = batch_size, seed, block_size
        self._ignore_first = ignore_first  # targets of a window, at most
        self.is_text = model == "gpt"
        self.everything: Tensor  # the ranks compare it before the first step
        if self.is_text:
            self.everything = load_corpus()
            self._corpus, self._held_out_corpus = split(self.everything)
        else:
            self._images, self._labels, self._held_out_images, self._held_out_labels = load_digits()
            self.everything = self._images

    @property
    def tokens_per_step(self) -> int:
        """Return the tokens of a global batch; for digits, the images."""
        return self._batch_size * (self._block_size if self.is_text else 1)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return the global batch (x, y) of a step."""
        if self.is_text:
            x, y = global_batch(self._corpus, self._seed, step, self._batch_size, self._block_size)
            return x, self._without_prompts(y, step)
        chosen = np.random.default_rng((self._seed, step)).integers(len(self._images), size=self._batch_size)
        return self._images[chosen], self._labels[chosen]

    def _without_prompts(self, y_bt: Tensor, step: int) -> Tensor:
        """Return the targets without the first ones of each window; how many, is drawn for each window."""
        if not self._ignore_first:
            return y_bt
        drawn = np.random.default_rng((self._seed, step, 1)).integers(self._ignore_first + 1, size=len(y_bt))
        return y_bt.masked_fill(torch.arange(y_bt.shape[1]) < torch.from_numpy(drawn)[:, None], IGNORED)

    @property
    def held_out_tokens(self) -> int:
        """Return the valid targets of all held-out batches; for digits, the images."""
        return sum(count_valid(y[counts]) for _, y, counts in self.held_out())

    def held_out(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield global batches (x, y, counts) that are not trained on, the same for each seed.

        All have the shape of a training batch, as a pipeline needs it. `counts` tells which examples count.
        Text: windows at equal distances in the held-out corpus. Digits: all test images; the last batch
        repeats some, and these do not count.
        """
        if self.is_text:
            corpus, size = self._held_out_corpus, self._block_size
            number = VALIDATION_BATCHES * self._batch_size
            starts = torch.arange(number) * (len(corpus) - size - 1) // number
            for some in starts.split(self._batch_size):
                windows = some[:, None] + torch.arange(size)
                y = self._without_prompts(corpus[windows + 1].long(), int(some[0]))
                yield corpus[windows].long(), y, some >= 0  # all count
        else:
            images, labels = self._held_out_images, self._held_out_labels
            number = -(-len(images) // self._batch_size) * self._batch_size
            for some in torch.arange(number).split(self._batch_size):
                at = some % len(images)
                yield images[at], labels[at], some < len(images)


def seed_step(seed: int, step: int, stream: int) -> None:
    """Seed torch's generators for a step. Ranks with equal `stream` draw the same numbers.

    They are a pure function of the arguments, so a resumed run draws the same as an uninterrupted one.
    """
    torch.manual_seed(int(np.random.default_rng((seed, step, stream)).integers(1 << 62)))
