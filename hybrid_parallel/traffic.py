"""Compute by formula what a rank sends along each axis in a step, from the formulas of the other lessons.

    axis       a rank sends in a step                                            formula
    pipeline   over each boundary of its stages m activations or m gradients;    Pipeline
               the gradient of a tied embedding
    data       zero 0   all-reduce of the gradients                              train_bucket_overlap.py
               compress the same, with fewer bytes                               compressors.py
               sync_every  after so many steps an all-reduce of the parameters   train_local_sgd.py
               zero 1   reduce-scatter of the gradients, all-gather of the       ZeroOptimizer
                        parameters
               zero 2   the same, with m reduce-scatters                         ZeroOptimizer
               zero 3   m reduce-scatters, 2 m all-gathers                       train_zero3.py
               experts  for each microbatch and block an all-gather of counts    expected_traffic.py
    context    for each microbatch and block keys and values, and their          context_parallel/cost.py
               gradients, round the ring, or 4 all-to-alls
    expert     for each microbatch and block 4 all-to-alls of tokens or          expected_traffic.py
               their gradients
    tensor     for each microbatch 4 all-reduces in a block, 2 for the           expected_traffic.py
               embedding and the head, 2 for the loss; each expert has 2

Replicas that differ along the context axis average gradients, too, so this counts for the data axis. What is
sent to and from experts depends on the router's choices: it is that of the last step. m is the number of
microbatches. The norm for clipping is one number along each axis whose ranks have different gradients.
comm/cost.py says what each of a pattern's collectives sends.
"""

from collections.abc import Iterator

from torch import Tensor

from comm.collectives import Group, chosen_pattern
from comm.cost import expected_traffic
from context_parallel.cost import all_to_all_layer, ring_layer
from expert_parallel.expected_traffic import counts_traffic, tokens_traffic
from hybrid_parallel import mesh
from hybrid_parallel.expert_axis import BalancedExperts, layers_of
from hybrid_parallel.hybrid import HybridParallel
from lab.trace.ledger import Traffic
from tensor_parallel.expected_traffic import ExpectedTraffic, modules_of
from training.gradients import average_traffic

ByAxis = dict[str, Traffic]
AXES = (*mesh.AXES, "expert")


def traffic_of_axes(hybrid: HybridParallel, is_clipped: bool) -> ByAxis:
    """Return what this rank sends along each axis in a step such as the last one."""
    groups = hybrid.mesh
    by_axis = {
        "pipeline": _of_numbers(is_clipped, groups.pipeline),
        "data": _of_data(hybrid, is_clipped) + _of_counts(hybrid),
        "context": _of_context(hybrid),
        "expert": Traffic(),
        "tensor": _of_tensor(hybrid)
        + average_traffic(hybrid.rounded, groups.tensor)
        + _of_numbers(is_clipped, groups.tensor),
    }
    if hybrid.pipeline is not None:
        by_axis["pipeline"] += hybrid.pipeline.traffic()
    if groups.experts is not None:
        by_axis["expert"] = _of_experts(hybrid) + _of_numbers(is_clipped, groups.experts.experts)
    return by_axis


def _of_data(hybrid: HybridParallel, is_clipped: bool) -> Traffic:
    if hybrid.local is not None and hybrid.are_equal:
        return hybrid.local.traffic(hybrid.optimizer)
    if hybrid.sizes.zero:
        return hybrid.data.traffic(hybrid.sizes.microbatches if hybrid.sizes.zero > 1 else 1, is_clipped)
    return hybrid.data.traffic()


def _of_counts(hybrid: HybridParallel) -> Traffic:
    return sum((counts_traffic(sent_rE, layer.groups) for layer, sent_rE in _noted(hybrid)), Traffic())


def _of_context(hybrid: HybridParallel) -> Traffic:
    if hybrid.context is None:
        return Traffic()
    config, sizes, shared = hybrid.plain.config, hybrid.sizes, hybrid.context.sequence
    head = hybrid.example_shape[0] * config.width // config.num_heads  # of a token, in all examples
    heads = config.num_heads // sizes.tensor, config.kv_heads // sizes.tensor
    layer_traffic = ring_layer if sizes.attention == "ring" else all_to_all_layer
    forward, backward = layer_traffic(shared, head, *heads, _itemsize_of(hybrid))
    blocks = sum(part.startswith("blocks.") for parts in _stages(hybrid) for part in parts)
    layer = [forward, backward] + [forward] * sizes.recompute
    return sum(layer * (blocks * sizes.microbatches), Traffic())


def _of_experts(hybrid: HybridParallel) -> Traffic:
    numbers = hybrid.plain.config.width, _itemsize_of(hybrid)
    forwards = (tokens_traffic(sent_rE, *numbers, layer.groups) for layer, sent_rE in _noted(hybrid))
    return _with_backwards(sum(forwards, Traffic()), hybrid)


def _with_backwards(forwards: Traffic, hybrid: HybridParallel) -> Traffic:
    """Add what backwards send, each as much as a forward; a recomputed layer has two forwards for each."""
    times = 1 + hybrid.sizes.recompute
    return forwards + Traffic(forwards.bytes_sent // times, forwards.messages_sent // times)


def _noted(hybrid: HybridParallel) -> Iterator[tuple[BalancedExperts, Tensor]]:
    """Yield, for each forward of each layer of experts, how many tokens each rank has sent to each expert."""
    yield from ((layer, sent_rE) for layer in layers_of(hybrid.stages) for sent_rE in layer.sent)


def _itemsize_of(hybrid: HybridParallel) -> int:
    """Return the bytes of a number that layers compute."""
    if hybrid.sizes.precision == "bf16":
        return 2
    return next(hybrid.module.parameters()).itemsize


def _of_tensor(hybrid: HybridParallel) -> Traffic:
    if hybrid.sizes.tensor == 1:
        return Traffic()
    expected = ExpectedTraffic(hybrid.layers, _itemsize_of(hybrid))
    shape, passes = hybrid.example_shape, []
    for parts in _stages(hybrid):
        passes.append(expected.of_parts(shape, parts))
        if hybrid.sizes.recompute and hybrid.pipeline is not None:  # a stage in one go
            passes.append(expected.of_recomputing(shape, parts))
        elif hybrid.sizes.recompute:
            passes += [expected.of_recomputing(shape, {p}) for p in parts if p.startswith("blocks.")]
    held, named = hybrid.trained_parameters(), hybrid.stages.named_own_parameters().items()
    undivided = [held[parameter].numel() for name, parameter in named if name not in hybrid.layers.dims]
    gradients = expected.of_gradients(sum(undivided))
    return sum(passes * hybrid.sizes.microbatches, _of_divided_experts(hybrid, expected) + gradients)


def _of_divided_experts(hybrid: HybridParallel, expected: ExpectedTraffic) -> Traffic:
    """Return the traffic of divided experts: an all-reduce of the outputs, and one in the backward."""
    forwards = Traffic()
    for layer, sent_rE in _noted(hybrid):
        own = layer.own_experts
        arrived = sent_rE[layer.groups.members, own.start : own.stop].sum(0).tolist()
        ops = [("all_reduce", number * hybrid.plain.config.width) for number in arrived]
        forwards += expected.sum(ops, expected.computed_itemsize)
    return _with_backwards(forwards, hybrid)


def _stages(hybrid: HybridParallel) -> Iterator[set[str]]:
    for stage in hybrid.stages.parts():
        yield modules_of(name for name, _ in stage.named_parameters(remove_duplicate=False))


def _of_numbers(count: int, group: Group) -> Traffic:
    pattern = chosen_pattern("all_reduce", group)
    return sum([expected_traffic("all_reduce", pattern, 1, 8, group)] * count, Traffic())
