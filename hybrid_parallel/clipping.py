"""Say which gradients a rank leaves out of the norm over a mesh: every number of the full model counts once.

      axis        what ranks have                                 what is added up
      pipeline    different stages; the tied embedding is on two  all stages, without the later copy
      tensor      parts of the divided parameters; the others,    all parts; the others on the first rank only
                  such as LayerNorm's weights, in full
      data        without ZeRO the same gradients                 nothing
                  with ZeRO different shards                      all shards

training/clipping.py adds the squares up along one axis after the other.
"""

import torch.distributed as dist
from torch import nn

from pipeline_parallel.pipeline import Pipeline
from tensor_parallel.parallelize import TensorParallel


def counted_elsewhere(pipeline: Pipeline | None, tensor: TensorParallel | None) -> set[nn.Parameter]:
    """Return the parameters of this rank whose gradients another rank of its replica counts."""
    found: set[nn.Parameter] = set()
    if pipeline is not None:
        found |= pipeline.later_copies()
    if tensor is not None and dist.get_rank(tensor.group) > 0:
        named = tensor.module.named_parameters(remove_duplicate=False)
        found |= {parameter for name, parameter in named if name not in tensor.dims}
    return found
