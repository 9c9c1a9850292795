"""Seed the random numbers of a step, so that ranks draw different ones where they compute different things.

      data parallel      a rank has its own examples                        masks of its own
      pipeline           a rank has its own layers                          masks of its own
      tensor parallel    all ranks compute the same residual stream         one mask for all
                         a rank has its own heads, or its own tokens        tensor_parallel/randomness.py

torch starts every process with the same seed. If n data parallel ranks kept it, they would all draw the same
dropout masks: a step would have the examples of n ranks, and the masks of one.
"""

import numpy as np
import torch


def seed_step(seed: int, step: int, stream: int) -> None:
    """Seed torch's generators for a step. Ranks with equal `stream` draw the same numbers.

    They are a pure function of the arguments, so a resumed run draws the same as an uninterrupted one.
    """
    torch.manual_seed(int(np.random.default_rng((seed, step, stream)).integers(1 << 62)))
