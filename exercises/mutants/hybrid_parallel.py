"""Wrong implementations of meshes and of their plans."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from comm.collectives import all_reduce, use_pattern
from comm.exchange import exchange
from data_parallel.train_bucket_overlap import BucketDataParallel
from exercises.mutants import mutant
from expert_parallel.config import ExpertGroups
from hybrid_parallel.clipping import clip_over, counted_elsewhere
from hybrid_parallel.context_axis import ContextAxis
from hybrid_parallel.expert_axis import BalancedExperts, ExpertAxis, Experts, ReplicatedExperts, experts_of
from hybrid_parallel.hybrid import HybridParallel, OptimizerClass
from hybrid_parallel.planner.shapes import ModelShape
from hybrid_parallel.planner.step_time import Pass, TimeModel
from hybrid_parallel.sizes import ParallelSizes
from lab.models.model import GPT
from pipeline_parallel.pipeline import Pipeline
from tensor_parallel.parallelize import TensorParallel
from zero.train_zero1 import ZeroOptimizer
from zero.train_zero2 import ZeroGradientOptimizer
from zero.train_zero3 import FullyShardedDataParallel


@mutant(
    target="hybrid_parallel.elastic.train_elastic.ElasticReplica.step",
    killer=(
        "tests.hybrid_parallel.test_elastic."
        "test_two_deaths_one_of_them_rank_0s_leave_every_gradient_that_of_one_process"
    ),
    symptom="After a death gradients are too small, and with Adam the loss looks normal.",
)
def elastic_divides_by_the_old_world_size(self, x: Tensor, y: Tensor, rank: int, ranks: int) -> Tensor:
    """Survivors of a death divide by the number of ranks before it."""
    self.first_ranks = getattr(self, "first_ranks", ranks)
    self.optimizer.zero_grad()
    mine = x.tensor_split(ranks)[rank], y.tensor_split(ranks)[rank]
    loss = self.sum_of_losses(self.model, *mine) / len(x) * ranks
    loss.backward()
    trained = [p for p in self.model.parameters() if p.requires_grad]
    flat = torch.cat([self._gradient(p).flatten() for p in trained] + [loss.detach().view(1)])
    all_reduce(flat, op="sum")
    *gradients, mean_loss = (flat / self.first_ranks).split([p.numel() for p in trained] + [1])
    for parameter, gradient in zip(trained, gradients, strict=True):
        parameter.grad = gradient.view_as(parameter)
    self.optimizer.step()
    self.steps += 1
    return mean_loss[0]


@mutant(
    target="hybrid_parallel.elastic.train_elastic.ElasticReplica.catch_up",
    killer=(
        "tests.hybrid_parallel.test_elastic."
        "test_a_rank_that_missed_a_step_which_others_have_taken_takes_over_their_state_and_takes_it_once"
    ),
    symptom="After a death the replicas differ: one of them has taken a step twice.",
)
def elastic_step_applied_twice(self) -> None:
    """A rank takes a step twice: it takes over the state of another, and keeps its own count of steps."""
    counts = exchange(self.steps)
    if min(counts) == max(counts) > 0:
        return
    state = self._state_of(counts.index(max(counts)))
    if self.steps < max(counts) or self.steps == 0:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


@mutant(
    target="hybrid_parallel.expert_axis.ExpertAxis.__init__",
    killer=(
        "tests.hybrid_parallel.test_narrated_axes."
        "test_the_auxiliary_loss_in_a_pipeline_is_the_mean_over_its_microbatches"
    ),
    cause="once too often for each microbatch",
    symptom="With more microbatches experts are chosen more equally, and the loss stays higher.",
)
def hybrid_auxiliary_loss_of_each_microbatch(
    self: ExpertAxis,
    model: GPT,
    experts: Experts,
    groups: ExpertGroups,
    microbatches: int,
    pattern: str | None,
) -> None:
    """More microbatches balance experts harder: the weight of the auxiliary loss is not divided among
    them.
    """
    self.groups = groups
    for group in (groups.experts, groups.replicas):
        use_pattern(pattern, group)
    weight = experts.aux_weight
    for number, block in enumerate(model.blocks):
        layer = BalancedExperts(model.config, experts.moe, groups, experts.seed, number, weight)
        block.mlp = layer.to(model.token_embedding.weight)


@mutant(
    target="hybrid_parallel.hybrid.HybridParallel.clip_grad_norm_",
    killer="tests.hybrid_parallel.test_equivalence.test_divided_layers_in_shards_of_zero_3_equal_one_process",
    cause="it is that of one rank's part",
)
def hybrid_clipped_by_one_tensor_ranks_norm(self: HybridParallel, max_norm: float) -> Tensor:
    """With ZeRO 3 beside tensor parallelism ranks clip differently: the norm is that of the data axis
    alone.
    """
    if self.sizes.zero == 3:
        return self.data.clip_grad_norm_(max_norm)
    groups = [self.mesh.pipeline, self.mesh.tensor]
    gradients = [(parameter, parameter.grad) for parameter in self.module.parameters()]
    uncounted = counted_elsewhere(self.pipeline, self.tensor)
    if self.sizes.zero:
        groups.append(self.mesh.replicas)
        gradients = [(piece.parameter, piece.tensor.grad) for piece in self.pieces]
    if self.experts is not None:
        groups.append(self.experts.groups.experts)
        if self.experts.groups.rank > 0:
            uncounted |= {*self.module.parameters()} - {*experts_of(self.module)}
    groups = [group for group in groups if dist.get_world_size(group) > 1]
    return clip_over(groups, gradients, uncounted, max_norm, self.pattern, self.device)


@mutant(
    target="hybrid_parallel.expert_axis.ReplicatedExperts.__init__",
    killer=(
        "tests.hybrid_parallel.test_context_and_experts.test_experts_divided_among_replicas_equal_one_process"
    ),
    symptom="With divided experts the loss falls more slowly than on one process, and experts become alike.",
)
def hybrid_experts_averaged_over_all_replicas(
    self: ReplicatedExperts, module: nn.Module, groups: ExpertGroups, pattern: str | None
) -> None:
    """Experts learn from the tokens of other experts: their gradients are averaged over all replicas."""
    self._experts, self._ranks = experts_of(module), groups.num_expert_ranks
    own = set(self._experts)
    dense = [parameter for parameter in module.parameters() if parameter not in own]
    both = (dense, groups.everyone), (self._experts, groups.everyone)
    self._parts = [BucketDataParallel(nn.ParameterList(p), group, pattern) for p, group in both]


@mutant(
    target="hybrid_parallel.hybrid.HybridParallel._replicate",
    killer=(
        "tests.hybrid_parallel.test_narrated_axes."
        "test_gradients_are_means_over_the_ranks_of_the_data_and_the_context_axis"
    ),
    cause="never pass from one group of ranks to the other",
    symptom="With a context axis the loss falls more slowly, and ranks end with different parameters.",
)
def hybrid_mean_over_data_without_context(
    self: HybridParallel, optimizer_class: OptimizerClass, options: dict[str, Any]
) -> None:
    """Ranks that have other tokens of the same examples drift apart: the mean is taken along data only."""
    group, pattern, zero = self.mesh.data, self.pattern, self.sizes.zero
    self.data: Any
    if zero in (1, 2):
        sharded = ZeroOptimizer if zero == 1 else ZeroGradientOptimizer
        parameters = self.module.parameters()
        self.data = self.optimizer = sharded(parameters, optimizer_class, group, pattern, **options)
        return
    if zero == 3:
        self.data = self.module = FullyShardedDataParallel(self.module, group, pattern=pattern)
    elif self.sizes.replicas > 1 and self.experts is not None:
        self.data = ReplicatedExperts(self.module, self.experts.groups, pattern)
    elif self.sizes.replicas > 1:
        self.data = BucketDataParallel(self.module, group, pattern)
    else:
        self.data = None
    self.optimizer = optimizer_class(self.module.parameters(), **options)


@mutant(
    target="hybrid_parallel.hybrid.HybridParallel._replicate",
    killer="tests.hybrid_parallel.test_equivalence.test_replicas_of_divided_tokens_equal_one_process",
    cause="never pass from one group of ranks to the other",
)
def hybrid_mean_over_the_wrong_axis(
    self: HybridParallel, optimizer_class: OptimizerClass, options: dict[str, Any]
) -> None:
    """Replicas drift apart, and layers that are divided get mixed up: the mean is taken over the tensor
    axis.
    """
    group, pattern, zero = self.mesh.replicas, self.pattern, self.sizes.zero
    self.data: Any
    if zero in (1, 2):
        sharded = ZeroOptimizer if zero == 1 else ZeroGradientOptimizer
        parameters = self.module.parameters()
        self.data = self.optimizer = sharded(parameters, optimizer_class, group, pattern, **options)
        return
    if zero == 3:
        self.data = self.module = FullyShardedDataParallel(self.module, group, pattern=pattern)
    elif self.sizes.replicas > 1 and self.experts is not None:
        self.data = ReplicatedExperts(self.module, self.experts.groups, pattern)
    elif self.sizes.replicas > 1:
        self.data = BucketDataParallel(self.module, group, pattern)
        self.data.group = self.mesh.tensor
    else:
        self.data = None
    self.optimizer = optimizer_class(self.module.parameters(), **options)


@mutant(
    target="hybrid_parallel.clipping.counted_elsewhere",
    killer="tests.hybrid_parallel.test_equivalence.test_pipelines_of_divided_layers_equal_one_process",
    cause="Count it once",
)
def hybrid_norm_counts_copies(pipeline: Pipeline | None, tensor: TensorParallel | None) -> set[nn.Parameter]:
    """Runs with a pipeline clip harder: a tied embedding counts in the norm once for each stage that has
    it.
    """
    found: set[nn.Parameter] = set()
    if tensor is not None and dist.get_rank(tensor.group) > 0:
        named = tensor.module.named_parameters(remove_duplicate=False)
        found |= {parameter for name, parameter in named if name not in tensor.dims}
    return found


@mutant(
    target="hybrid_parallel.context_axis.ContextAxis._at_own_positions",
    killer=(
        "tests.hybrid_parallel.test_context_and_experts."
        "test_cut_sequences_beside_divided_layers_equal_one_process"
    ),
    symptom="With a context axis the loss is not that of one process, from the first step on.",
)
def hybrid_positions_of_own_tokens(self: ContextAxis, _: nn.Module, args: tuple[Any, ...]) -> tuple[Tensor]:
    """Every rank looks up positions 0, 1, ... for its tokens: a pre-hook that returns nothing changes
    nothing.
    """
    [positions_t] = args
    args = (self._positions.to(positions_t.device)[positions_t],)


@mutant(
    target="hybrid_parallel.mesh.stream_of",
    killer="tests.hybrid_parallel.test_run.test_replicas_and_stages_draw_masks_of_their_own",
)
def hybrid_replicas_draw_alike(rank: int, sizes: ParallelSizes) -> int:
    """More replicas help less than they should: all draw the same dropout masks."""
    return rank // (sizes.tensor * sizes.replicas)


@mutant(
    target="hybrid_parallel.hybrid.HybridParallel.finish_gradient_sync",
    killer=(
        "tests.hybrid_parallel.test_equivalence.test_divided_tokens_and_gradients_in_shards_equal_one_process"
    ),
)
def hybrid_terms_lost_beside_zero(self: HybridParallel) -> None:
    """With ZeRO norms drift apart: their terms are added up in gradients that ZeRO has already taken and
    sent.
    """
    if self.pipeline is not None:
        self.pipeline.finish_gradient_sync()
    if self.data is not None:
        self.data.finish_gradient_sync()
    if self.terms is not None and not self.sizes.zero:
        self.terms.finish_gradient_sync()


@mutant(
    target="hybrid_parallel.hybrid.HybridParallel.finish_gradient_sync",
    killer="tests.hybrid_parallel.test_equivalence.test_a_tied_embedding_gets_the_sum_of_both_stages",
)
def hybrid_tied_embedding_over_the_wrong_axis(self: HybridParallel) -> None:
    """The first and the last stage train different embeddings: the sum is taken over the replicas."""
    if self.pipeline is not None:
        for parameter, _ in self.pipeline.tied:
            all_reduce(parameter.grad, op="mean", group=self.mesh.replicas)
        self.pipeline._is_complete = True
    if self.data is not None:
        self.data.finish_gradient_sync()
    if self.terms is not None:
        self.terms.finish_gradient_sync()


@mutant(
    target="hybrid_parallel.planner.memory.tokens_of",
    killer=(
        "tests.hybrid_parallel.test_planner_memory."
        "test_microbatches_divide_what_a_step_holds_without_a_pipeline"
    ),
)
def planner_holds_the_batch_at_once(shape: ModelShape, sizes: ParallelSizes, batch: int) -> float:
    """The planner asks for too many devices: each microbatch counts as large as a replica's batch."""
    return batch / sizes.data * shape.sequence_length / sizes.context


@mutant(
    target="hybrid_parallel.planner.step_time.TimeModel.layer",
    killer="tests.hybrid_parallel.test_planner_time.test_recomputation_adds_a_third_to_the_layers",
)
def planner_recomputes_for_free(self: TimeModel, sizes: ParallelSizes) -> tuple[Pass, Pass, Pass]:
    """The planner always recomputes: the second forward saves memory, and its time is not counted."""
    compute = self._compute(sizes)
    forward, backward = self._tensor(sizes, compute)
    return Pass(compute) + forward, Pass(compute) + backward, Pass(compute)
