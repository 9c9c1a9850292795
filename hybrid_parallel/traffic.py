"""Compute by formula what a rank sends along each axis in a step, from the formulas of the other lessons.

    axis       a rank sends in a step                                            formula
    pipeline   over each boundary of its stages m activations or m gradients;    Pipeline
               the gradient of a tied embedding
    data       zero 0   all-reduce of the gradients                              train_bucket_overlap.py
               zero 1   reduce-scatter of the gradients, all-gather of the       ShardedOptimizer
                        parameters
               zero 2   the same, with m reduce-scatters                         ShardedOptimizer
               zero 3   m reduce-scatters, 2 m all-gathers                       ShardedModule
               experts  for each microbatch and block an all-gather of counts    expected_traffic.py
    context    for each microbatch and block keys and values, and their          expected_traffic.py
               gradients, round the ring, or 4 all-to-alls
    expert     for each microbatch and block 4 all-to-alls of tokens or          expected_traffic.py
               their gradients
    tensor     for each microbatch 4 all-reduces in a block, 2 for the           expected_traffic.py
               embedding and the head, 2 for the loss; each expert has 2

Replicas that differ along the context axis average gradients, too, so what they send for that counts for the
data axis. What is sent to and from experts depends on the router's choices: it is that of the last step.
m is the number of microbatches. The loss is one number along pipeline and data, the norm for clipping one
along each axis whose ranks have different gradients. comm/cost.py says what each of a pattern's collectives
sends.
"""

from collections.abc import Collection, Iterator

from comm.collectives import Group, chosen_pattern
from comm.cost import expected_traffic
from data_parallel.train_bucket_overlap import BucketDataParallel, traffic_per_step
from expert_parallel.expected_traffic import counts_traffic
from hybrid_parallel import mesh
from hybrid_parallel.context_axis import layer_traffic
from hybrid_parallel.expert_axis import (
    ReplicatedExperts,
    arrived_tokens,
    layers_of,
    of_backwards,
    tokens_traffic,
)
from hybrid_parallel.hybrid import HybridParallel
from lab.trace.ledger import Traffic
from tensor_parallel.expected_traffic import ExpectedTraffic, parts_of
from zero import train_zero1, train_zero3

ByAxis = dict[str, Traffic]
AXES = (*mesh.AXES, "expert")


def traffic_of_axes(hybrid: HybridParallel, is_clipped: bool) -> ByAxis:
    """Return what this rank sends along each axis in a step such as the last one."""
    groups = hybrid.mesh
    numbers = 1 + is_clipped  # the loss, the norm
    by_axis = {
        "pipeline": _of_pipeline(hybrid) + _of_numbers(numbers, groups.pipeline),
        "data": _of_data(hybrid, is_clipped) + _of_counts(hybrid) + _of_numbers(1, groups.replicas),
        "context": _of_context(hybrid),
        "expert": Traffic(),
        "tensor": _of_tensor(hybrid) + _of_numbers(is_clipped, groups.tensor),
    }
    if hybrid.experts is not None:
        by_axis["expert"] = _of_experts(hybrid) + _of_numbers(is_clipped, hybrid.experts.groups.experts)
    return by_axis


def _of_pipeline(hybrid: HybridParallel) -> Traffic:
    return Traffic() if hybrid.pipeline is None else hybrid.pipeline.traffic_per_step()


def _of_data(hybrid: HybridParallel, is_clipped: bool) -> Traffic:
    """Return the traffic of gradients and parameters; with ZeRO the norm needs one more number."""
    if hybrid.data is None:
        return Traffic()
    if isinstance(hybrid.data, BucketDataParallel):
        return traffic_per_step(hybrid.data, hybrid.pattern)
    if isinstance(hybrid.data, ReplicatedExperts):
        return hybrid.data.traffic_per_step()
    if isinstance(hybrid.data, train_zero3.FullyShardedDataParallel):
        return train_zero3.traffic_per_step(hybrid.data, hybrid.sizes.microbatches, is_clipped)
    reductions = hybrid.sizes.microbatches if hybrid.sizes.zero > 1 else 1
    return train_zero1.traffic_per_step(hybrid.data, reductions, is_clipped)


def _of_counts(hybrid: HybridParallel) -> Traffic:
    """Return the traffic of the all-gathers that tell replicas how many tokens have chosen each expert."""
    noted = ((layer, sent_rE) for layer in layers_of(hybrid.module) for sent_rE in layer.sent)
    return sum((counts_traffic(sent_rE, layer.groups) for layer, sent_rE in noted), Traffic())


def _of_context(hybrid: HybridParallel) -> Traffic:
    if hybrid.context is None:
        return Traffic()
    examples, config = hybrid.example_shape[0], hybrid.plain.config
    forward, backward = layer_traffic(hybrid.context, examples, config, itemsize_of(hybrid))
    blocks = sum(part.startswith("blocks.") for parts in _stages(hybrid) for part in parts)
    layer = [forward, backward] + [forward] * hybrid.sizes.recompute
    return sum(layer * (blocks * hybrid.sizes.microbatches), Traffic())


def _of_experts(hybrid: HybridParallel) -> Traffic:
    layers, is_recomputed = layers_of(hybrid.module), hybrid.sizes.recompute
    return sum((tokens_traffic(layer, itemsize_of(hybrid), is_recomputed) for layer in layers), Traffic())


def itemsize_of(hybrid: HybridParallel) -> int:
    """Return the bytes of a number that layers compute."""
    if hybrid.sizes.precision == "bf16":
        return 2
    return next(hybrid.module.parameters()).itemsize


def expected_of_tensor(hybrid: HybridParallel) -> ExpectedTraffic:
    """Return the formulas of the tensor axis, which must have several ranks."""
    assert hybrid.tensor is not None
    return ExpectedTraffic(hybrid.tensor, itemsize_of(hybrid))


def _of_tensor(hybrid: HybridParallel) -> Traffic:
    if hybrid.tensor is None:
        return Traffic()
    expected, shape = expected_of_tensor(hybrid), hybrid.example_shape
    layers = [expected.of_parts(shape, parts) for parts in _stages(hybrid)]
    layers += [expected.of_recomputing(shape, parts) for parts in _recomputed(hybrid)]
    experts = _of_divided_experts(hybrid, expected)
    gradients = expected.of_gradients(_replicated_numel(hybrid, hybrid.tensor.dims))
    return sum(layers * hybrid.sizes.microbatches, experts + gradients)


def _of_divided_experts(hybrid: HybridParallel, expected: ExpectedTraffic) -> Traffic:
    """Return the traffic of divided experts: an all-reduce of the outputs, and one in the backward."""
    width = hybrid.plain.config.width if hybrid.experts is not None else 0
    tokens = [number for layer in layers_of(hybrid.module) for number in arrived_tokens(layer)]
    forwards = expected.sum([("all_reduce", number * width) for number in tokens], expected.computed_itemsize)
    return forwards + of_backwards(forwards, hybrid.sizes.recompute)


def _stages(hybrid: HybridParallel) -> Iterator[set[str]]:
    stages = [hybrid.plain] if hybrid.pipeline is None else hybrid.pipeline.stages.values()
    for stage in stages:
        yield parts_of(name for name, _ in stage.named_parameters(remove_duplicate=False))


def _recomputed(hybrid: HybridParallel) -> Iterator[set[str]]:
    """Yield the modules of each part of the model that a backward recomputes: a stage, or a block."""
    for parts in _stages(hybrid) if hybrid.sizes.recompute else ():
        if hybrid.pipeline is not None:
            yield parts
        else:
            yield from ({part} for part in parts if part.startswith("blocks."))


def _replicated_numel(hybrid: HybridParallel, divided: Collection[str]) -> int:
    """Return the number of elements that this rank trains of parameters that no tensor rank divides."""
    replicated = [
        parameter for name, parameter in hybrid.named_own_parameters().items() if name not in divided
    ]
    if not hybrid.sizes.zero:
        return sum(parameter.numel() for parameter in replicated)
    of_shards = {shard.parameter: shard.tensor.numel() for shard in hybrid.zero_shards}
    return sum(of_shards[parameter] for parameter in replicated)


def _of_numbers(count: int, group: Group) -> Traffic:
    return sum(
        [expected_traffic("all_reduce", chosen_pattern("all_reduce", group), 1, 8, group)] * count, Traffic()
    )
