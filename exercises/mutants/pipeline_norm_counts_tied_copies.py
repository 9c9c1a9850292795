"""With tied weights clipping is too strong: the norm counts the embedding on both ranks that have a copy."""

from torch import Tensor

from training.clipping import clip_grad_norm_

TARGET = "pipeline_parallel.pipeline.Pipeline.clip_grad_norm_"
KILLER = "tests.pipeline_parallel.test_plausible_use.test_the_norm_is_that_of_all_stages"
CAUSE = "counted on each"
SYMPTOM = "With tied weights clipping is too strong."


def mutant(self, max_norm: float) -> Tensor:
    return clip_grad_norm_(self.parameters(), max_norm, self.group, device=self.device)
