"""Predict the seconds of a training step from the operations, the bytes and the messages of each rank.

    a layer        matrix products and attention: operations / rate; norms, activation functions, residuals
                   and masks: bytes / bandwidth; as long for a forward as for the gradients of inputs and for
                   those of weights; recomputation adds a forward
    tensor axis    2 all-reduces in the forward and 2 in the backward of a layer, with experts 1 for attention
                   and 1 for each expert of a token; or as many gathers and scatters with sequence
                   parallelism; hidden only on this machine, in part (`_exposed`)
    context axis   keys and values of other ranks' tokens (context_time.py)
    experts        tokens on their way to experts and back (expert_time.py)
    pipeline       microbatches * slowest rank, and the idle time of the schedule from the simulator; for long
                   schedules from a formula, and then the time of the messages between stages is added
    data axis      gradients, ZeRO and the optimizer (replica_time.py)
    overhead       the share of a step that is in none of these, one number for all GPUs (machine.py)

Ranks that share cores compute at the same time, each with its share of a core; only in a pipeline does one
rank compute while another one waits (shared_cores.py). Collectives need cores, too: the time that a rank
spends on calls, copies and sums counts as computing, and the rest of a collective as waiting.

A rank does these parts one after the other, so their seconds are added. A collective takes the time of a ring
in comm/cost.py: alpha for each message and beta for each byte.
"""

from collections.abc import Callable, Hashable
from functools import cache

from comm.cost import Link
from hybrid_parallel.planner.context_time import context_passes
from hybrid_parallel.planner.expert_time import expert_passes
from hybrid_parallel.planner.machine import Machine
from hybrid_parallel.planner.memory_model import (
    ITEMSIZE,
    fullest_ranks,
    has_head,
    layers_by_stage,
    layers_of,
    state_bytes,
    tokens_of,
)
from hybrid_parallel.planner.replica_time import optimizer_seconds, replica_seconds
from hybrid_parallel.planner.seconds import Pass, Seconds, collective
from hybrid_parallel.planner.shapes import AnyShape
from hybrid_parallel.planner.shared_cores import makespan
from hybrid_parallel.sizes import ParallelSizes
from pipeline_parallel.analysis import theory
from pipeline_parallel.analysis.simulate import Costs
from pipeline_parallel.schedules import table_of

SIMULATED = 128  # stages * microbatches of the longest schedule that is simulated
_table_of = cache(table_of)


class TimeModel:
    """Predicts the steps of one model on one machine; `batch` counts the examples of a step, over all ranks.

    What several plans have in common is computed once.
    """

    def __init__(self, shape: AnyShape, machine: Machine, batch: int) -> None:
        self.shape, self.machine, self.batch = shape, machine, batch
        self._layers: dict[Hashable, tuple[Pass, Pass, Pass]] = {}
        self._makespans: dict[Hashable, float] = {}

    def utilisation(self, sizes: ParallelSizes, seconds: float, causal: bool = False) -> float:
        """Return the share of the devices' peak rate that the model's own operations take (MFU).

        `causal` is that of `AnyShape.flops_per_token`.
        """
        operations = self.shape.flops_per_token(causal) * self.batch * self.shape.sequence_length
        peak = self.machine.device.peak_flops[sizes.precision] * self.machine.share
        return operations / (seconds * peak * sizes.world_size)

    def predict(self, sizes: ParallelSizes) -> Seconds:
        """Return the predicted seconds of a step of a plan."""
        m, passes, ends = sizes.microbatches, self.layer(sizes), self._ends(sizes)

        def busy(rank: int) -> float:
            layers = layers_of(self.shape, sizes, rank)
            own = ends[0] * (rank == 0) + ends[1] * has_head(sizes, rank)
            return layers * sum(each.total for each in passes) + 3 * own

        slowest, share = max(fullest_ranks(sizes), key=busy), self.machine.share
        layers = layers_of(self.shape, sizes, slowest)
        waits = {
            axis: m * layers * sum(getattr(each, axis) for each in passes)
            for axis in ("tensor", "context", "experts")
        }
        waiting = sum(waits.values())
        compute = (m * busy(slowest) - waiting) / share
        if share < 1 and sizes.pipeline > 1:
            work = self.shape.num_layers * sum(each.compute for each in passes) + 3 * sum(ends)
            compute = m * work / (sizes.pipeline * share)
        bubble, messages = self._pipeline(sizes, passes, ends, compute + waiting)
        if bubble < 0:  # on shared cores one stage computes while another one waits for a collective
            left = max(0.0, waiting + bubble) / waiting if waiting else 0.0
            waits, bubble = {axis: seconds * left for axis, seconds in waits.items()}, 0.0
        forward, *backward = (layers * (each.compute / share + each.waiting) for each in passes)
        parts = {
            "compute": compute,
            **waits,
            "bubble": bubble,
            "messages": messages + self._tied(sizes),
            "data": replica_seconds(self.shape, self.machine, sizes, forward, sum(backward)),
            "optimizer": optimizer_seconds(self.shape, self.machine, sizes),
        }
        share = self.machine.device.overhead
        return Seconds(**parts, overhead=sum(parts.values()) * share / (1 - share))

    def layer(self, sizes: ParallelSizes) -> tuple[Pass, Pass, Pass]:
        """Return a layer's forward, input gradient and weight gradient for one microbatch.

        Each computes for about as long as the others. The input gradient includes recomputation.
        """
        axes = (sizes.data, sizes.context, sizes.attention, sizes.tensor, sizes.expert_ranks)
        key = (*axes, sizes.microbatches, sizes.sequence_parallel, sizes.precision, sizes.recompute)
        if key not in self._layers:
            compute, tensor = self._compute(sizes), self._collectives(sizes)
            waits = self._exposed(sizes, compute) if self.machine.hides_reductions else tensor
            gathers_again = sizes.sequence_parallel and self.machine.hides_reductions
            handling = self._handling(sizes)
            forward = _handled(compute, tensor, handling)
            backward = _handled(compute, waits, handling * (1.5 if gathers_again else 1))
            of_model = self.shape, self.machine, sizes, self._tokens(sizes)
            for more in (context_passes(*of_model, self._attention(sizes)), expert_passes(*of_model)):
                forward, backward = forward + more[0], backward + more[1]
            if sizes.recompute:
                backward += forward
            added = 3 * self._reading(sizes) * (sizes.microbatches > 1)  # to earlier microbatches' gradients
            self._layers[key] = forward, backward, Pass(compute + added)
        return self._layers[key]

    def _tokens(self, sizes: ParallelSizes) -> float:
        return tokens_of(self.shape, sizes, self.batch)

    def _compute(self, sizes: ParallelSizes) -> float:
        """Return the seconds of a layer's forward without communication. Its backward takes twice that."""
        shape, device, t = self.shape, self.machine.device, sizes.tensor
        matmuls = 2 * shape.active_weights / t / device.flops(sizes.precision)
        replicated, divided = shape.moved_bytes(ITEMSIZE[sizes.precision])
        moving = replicated / (t if sizes.sequence_parallel else 1) + divided / t
        small = device.layer_seconds + self._reading(sizes)
        of_tokens = self._tokens(sizes) * (matmuls + moving / device.bytes_per_second)
        return small + of_tokens + self._attention(sizes)

    def _attention(self, sizes: ParallelSizes) -> float:
        """Return the seconds of the scores and the sums of a layer's attention in the forward."""
        shape, rate = self.shape, self.machine.device.attention_flops(sizes.precision)
        operations = 4 * shape.sequence_length * shape.query_width * (0.5 if shape.fused_attention else 1)
        return self._tokens(sizes) * operations / sizes.tensor / rate

    def _reading(self, sizes: ParallelSizes) -> float:
        """Return the seconds in which a core reads the weights of a layer before it multiplies with them.

        A GPU reads them while it multiplies.
        """
        if self.machine.cores is None:
            return 0.0
        size = self.shape.held_weights(sizes.expert_ranks) / sizes.tensor * ITEMSIZE[sizes.precision]
        return size / self.machine.device.bytes_per_second

    def _collectives(self, sizes: ParallelSizes) -> float:
        """Return the seconds of a layer's collectives along the tensor axis in the forward.

        The backward has as many.
        """
        t, tokens, c = sizes.tensor, self._tokens(sizes), ITEMSIZE[sizes.precision]
        stream, link = tokens * self.shape.width * c, self.machine.link(t, 1)
        if sizes.sequence_parallel:
            around = collective("all_gather", stream, t, link)
            around += collective("reduce_scatter", stream, t, link)
        else:
            around = collective("all_reduce", stream, t, link)
        return self.shape.reductions * around

    def _handling(self, sizes: ParallelSizes) -> float:
        """Return the seconds of a core that the collectives of a layer's forward need on the tensor axis."""
        t = sizes.tensor
        if t == 1:
            return 0.0
        stream = self._tokens(sizes) * self.shape.width * ITEMSIZE[sizes.precision]
        calls = 2 if sizes.sequence_parallel else 1
        return self.shape.reductions * self.machine.handling.seconds(calls, 2 * (t - 1) / t * stream)

    def _exposed(self, sizes: ParallelSizes, compute: float) -> float:
        """Return the seconds of a layer's collectives in the backward that tensor_parallel/overlapped.py does
        not hide. The gradients of inputs take `compute` seconds, and those of weights take as many.

        Column-parallel layers hide their collectives: the reduction of the input's gradient behind the
        weight's gradient, and with sequence parallelism a second gather behind the input's gradient.
        """
        shape, t, link = self.shape, sizes.tensor, self.machine.link(sizes.tensor, 1)
        stream = self._tokens(sizes) * shape.width * ITEMSIZE[sizes.precision]
        hiding = shape.column_weights / shape.active_weights * compute / self.machine.share
        if not sizes.sequence_parallel:
            return max(0.0, shape.reductions * collective("all_reduce", stream, t, link) - hiding)
        gather, scatter = (
            shape.reductions * collective(op, stream, t, link) for op in ("all_gather", "reduce_scatter")
        )
        return gather + max(0.0, gather - hiding) + max(0.0, scatter - hiding)

    def _ends(self, sizes: ParallelSizes) -> tuple[float, float]:
        """Return the seconds before the layers and after them in the forward; the backward takes twice that.

        After the layers come the head and the loss.
        """
        device, c = self.machine.device, ITEMSIZE[sizes.precision]
        first, last = (2 * weights / device.flops(sizes.precision) for weights in self.shape.end_weights)
        last += self.shape.last_numbers[1] * (2 * c + 4) / device.bytes_per_second
        return self._tokens(sizes) / sizes.tensor * first, self._tokens(sizes) / sizes.tensor * last

    def _message(self, sizes: ParallelSizes) -> float:
        """Return the seconds of a message to the next stage: a shard from each tensor rank, and a gather."""
        tokens, t = self._tokens(sizes), sizes.tensor
        size = tokens * self.shape.width * ITEMSIZE[sizes.precision]
        link = self.machine.link(2, sizes.replicas * t)
        gather = collective("all_gather", size, t, self.machine.link(t, 1))
        gather *= not sizes.sequence_parallel
        return link.alpha + size / t * link.beta + gather

    def _pipeline(
        self, sizes: ParallelSizes, passes: tuple[Pass, Pass, Pass], ends: tuple[float, float], busy: float
    ) -> tuple[float, float]:
        """Return the seconds in which the slowest rank, which works for `busy` seconds, is idle, and those in
        which it waits for messages.

        The simulator takes stages of any length, and its idle time includes the messages. The formula for
        long schedules takes the mean of all ranks.
        """
        if sizes.pipeline == 1:
            return 0.0, 0.0
        stages, m, message = sizes.num_stages, sizes.microbatches, self._message(sizes)
        if stages * m <= SIMULATED:
            return self._simulated(sizes, passes, ends, message) - busy, 0.0
        mean = self.shape.num_layers / sizes.pipeline
        seconds = [mean * each.total + sum(ends) / sizes.pipeline for each in passes]
        idle = theory.idle(sizes.schedule, sizes.pipeline, m, sizes.chunks, *seconds)
        if idle is None:  # zb_v has a formula for any m if all three are equal
            idle = theory.idle(sizes.schedule, sizes.pipeline, m, sizes.chunks, *[sum(seconds) / 3] * 3)
        assert idle is not None
        return idle, 2 * m * stages / sizes.pipeline * message

    def _simulated(
        self, sizes: ParallelSizes, passes: tuple[Pass, Pass, Pass], ends: tuple[float, float], message: float
    ) -> float:
        """Return the makespan of the pipeline, with its messages, in seconds."""
        stages = sizes.num_stages
        layers = layers_by_stage(self.shape.num_layers, stages)
        none = [0.0] * stages
        at_ends = [ends[0], *none[2:], ends[1]]

        def costs(of_layer: Callable[[Pass], float], at_ends: list[float]) -> Costs:
            by_pass = (
                [n * of_layer(e) + end for n, end in zip(layers, at_ends, strict=True)] for e in passes
            )
            return Costs(*map(tuple, by_pass))

        work, waiting = costs(lambda e: e.compute, at_ends), costs(lambda e: e.waiting, none)
        plan = (sizes.schedule, sizes.pipeline, sizes.microbatches, sizes.chunks)
        key = (plan, work, waiting, message, self.machine.share)
        if key not in self._makespans:
            cores = self.machine.share * sizes.pipeline
            self._makespans[key] = makespan(_table_of(*plan), work, waiting, cores, Link(0.0, message), 1)
        return self._makespans[key]

    def _tied(self, sizes: ParallelSizes) -> float:
        """Return the seconds in which the first and the last stage exchange the gradient of a tied weight."""
        rank = 0 if sizes.schedule == "zb_v" else sizes.pipeline - 1
        if not self.shape.tied or rank == 0:
            return 0.0
        link = self.machine.link(2, (sizes.pipeline - 1) * sizes.replicas * sizes.tensor)
        _, of_gradient, _ = state_bytes(sizes, self.machine.autocast)
        return link.alpha + self.shape.head_parameters / sizes.tensor * of_gradient * link.beta


def _handled(compute: float, waiting: float, handling: float) -> Pass:
    """Return a pass in which the core works for `handling` of the `waiting` seconds of collectives."""
    return Pass(compute + handling, max(0.0, waiting - handling))
