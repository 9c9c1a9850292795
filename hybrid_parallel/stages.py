"""Answer for a model's stages: what of the model this rank has, in one stage or in those of a pipeline.

      OneStage          all layers
      PipelineStages    this rank's stages of them; with them only its own parameters stay in memory

Both go around a ModelOnRank (training/model_on_rank.py): all of each layer, a TensorParallel or an
ExpertModel. They have the same methods, and hand on to their layers what these know.
"""

from torch import Tensor, nn

from comm.collectives import Group
from hybrid_parallel.sizes import ParallelSizes
from pipeline_parallel.pipeline import Pipeline
from pipeline_parallel.schedules import table_of
from training.model_on_rank import ModelOnRank


class OneStage(nn.Module):
    """All layers of the model."""

    def __init__(self, layers: ModelOnRank) -> None:
        super().__init__()
        self.layers = layers
        self.first_names = {parameter: name for name, parameter in layers.plain.named_parameters()}

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)

    def parts(self) -> list[nn.Module]:
        """Return the modules of this rank, whose buffers have the names that they have in the model."""
        return [self.layers.plain]

    def named_own_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters by all names that they have; a tied one has two."""
        return dict(self.layers.plain.named_parameters(remove_duplicate=False))

    def finish_gradient_sync(self) -> None:
        """Complete the gradients of parameters that two stages share: here there are none."""

    def later_copies(self) -> set[nn.Parameter]:
        """Return the copies of shared parameters that an earlier stage has, too: here there are none."""
        return set()

    @property
    def norm_groups(self) -> list[Group]:
        return self.layers.norm_groups

    def counted_elsewhere(self) -> set[nn.Parameter]:
        return self.layers.counted_elsewhere()

    def full_state_dict(self) -> dict[str, Tensor]:
        return self.layers.full_state_dict()


class PipelineStages(Pipeline):
    """This rank's stages of the model, on the ranks of `group`; `example` is one microbatch on this rank."""

    layers: ModelOnRank

    def __init__(self, layers: ModelOnRank, sizes: ParallelSizes, example: Tensor, group: Group) -> None:
        table = table_of(sizes.schedule, sizes.pipeline, sizes.microbatches, sizes.chunks)
        super().__init__(layers.plain, table, layers.loss, example, group, recompute=sizes.recompute)
        object.__setattr__(self, "layers", layers)  # no submodule: it has the parameters of all stages
        for parameter in {*layers.plain.parameters()} - {*self.parameters()}:
            parameter.data = parameter.data.new_empty(0)  # it belongs to another rank's stage

    def parts(self) -> list[nn.Module]:
        return [*self.stages.values()]

    @property
    def norm_groups(self) -> list[Group]:
        return [self.group, *self.layers.norm_groups]

    def counted_elsewhere(self) -> set[nn.Parameter]:
        return self.later_copies() | self.layers.counted_elsewhere()

    def full_state_dict(self) -> dict[str, Tensor]:
        return self.layers.full_state_dict(super().full_state_dict())
