"""More microbatches balance experts harder: the weight of the auxiliary loss is not divided among them."""

from comm.chosen_pattern import use_pattern
from expert_parallel.groups import ExpertGroups
from hybrid_parallel.expert_axis import BalancedExperts, ExpertAxis, Experts
from lab.models.model import GPT

TARGET = "hybrid_parallel.expert_axis.ExpertAxis.__init__"
KILLER = (
    "tests.hybrid_parallel.test_narrated_axes."
    "test_the_auxiliary_loss_in_a_pipeline_is_the_mean_over_its_microbatches"
)
CAUSE = "once too often for each microbatch"
SYMPTOM = "With more microbatches experts are chosen more equally, and the loss stays higher."


def mutant(
    self: ExpertAxis,
    model: GPT,
    experts: Experts,
    groups: ExpertGroups,
    microbatches: int,
    pattern: str | None,
) -> None:
    self.groups = groups
    for group in (groups.experts, groups.replicas):
        use_pattern(pattern, group)
    weight = experts.aux_weight
    for number, block in enumerate(model.blocks):
        layer = BalancedExperts(model.config, experts.moe, groups, experts.seed, number, weight)
        block.mlp = layer.to(model.token_embedding.weight)
