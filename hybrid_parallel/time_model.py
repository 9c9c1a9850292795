"""Predict the seconds of a training step from the operations, the bytes and the messages of each rank.

    a layer        matrix products and attention: operations / rate; norms, activation functions, residuals
                   and masks: bytes / bandwidth; so much for a forward, for the gradients of inputs and for
                   those of weights; recomputation adds a forward
    tensor axis    2 all-reduces in the forward and 2 in the backward of a layer, or as many gathers and
                   scatters with sequence parallelism; none is hidden (tensor_parallel/expected_traffic.py)
    context axis   a gather of all keys and values before attention, and a scatter of their gradients
    pipeline       microbatches * slowest rank, and the idle time of the schedule, by the simulator; for long
                   schedules by formula, and then a rank also waits for each message between stages
    data axis      gradients and what ZeRO gathers, a layer at a time; without a pipeline hidden behind the
                   computing of one microbatch, but for one layer's
    optimizer      bytes / bandwidth
    overhead       the share of a step that is in none of these, one number for all GPUs (machine.py)

The parts follow one another on a rank, so their seconds are added. Collectives take the time of comm/cost.py:
alpha for each message and beta for each byte, around a ring.
"""

from collections.abc import Hashable
from dataclasses import dataclass

from comm import cost
from comm.cost import Link
from hybrid_parallel.machine import Machine
from hybrid_parallel.memory_model import (
    ITEMSIZE,
    STATE,
    fullest_ranks,
    has_head,
    layers_by_stage,
    layers_of,
    parameters_of,
    tokens_of,
)
from hybrid_parallel.shapes import ModelShape
from hybrid_parallel.sizes import ParallelSizes
from pipeline_parallel import theory
from pipeline_parallel.schedules import table_of
from pipeline_parallel.simulate import Costs, simulate

ADAM_BYTES = 28  # read and written for each number: parameter, gradient, both moments
SIMULATED = 128  # stages * microbatches of the longest schedule that is simulated


@dataclass(frozen=True)
class Seconds:
    """Holds the seconds of a step by cause; their sum is the step."""

    compute: float  # of the slowest stage, recomputation included
    tensor: float  # collectives of the tensor and the context axis
    bubble: float
    messages: float
    data: float  # what is not hidden
    optimizer: float
    overhead: float

    @property
    def total(self) -> float:
        """Return the seconds of the step."""
        return sum(vars(self).values())


@dataclass(frozen=True)
class Pass:
    """Holds the seconds of a forward or a backward of one layer: computing, and waiting for collectives."""

    compute: float
    tensor: float

    @property
    def total(self) -> float:
        """Return the sum of both."""
        return self.compute + self.tensor


def collective(op: str, size: float, ranks: int, link: Link) -> float:
    """Return the seconds of a collective around a ring; all shards together have `size` bytes."""
    return cost.seconds(op, "ring", round(size), ranks, link)


class TimeModel:
    """Predicts the steps of one model on one machine; `batch` is the examples of a step, over all ranks.

    `context` ranks divide each sequence, in addition to the axes of the sizes, and lie between the tensor and
    the data axis. What several plans have in common is computed once.
    """

    def __init__(self, shape: ModelShape, machine: Machine, batch: int, context: int = 1) -> None:
        self.shape, self.machine, self.batch, self.context = shape, machine, batch, context
        self._layers: dict[Hashable, tuple[Pass, Pass, Pass]] = {}
        self._makespans: dict[Hashable, float] = {}

    def utilisation(self, sizes: ParallelSizes, seconds: float, causal: bool = False) -> float:
        """Return the share of the devices' peak rate that the model's own operations take (MFU).

        `causal` is that of `ModelShape.flops_per_token`.
        """
        operations = self.shape.flops_per_token(causal) * self.batch * self.shape.sequence_length
        peak = self.machine.device.peak_flops[sizes.precision]
        return operations / (seconds * peak * sizes.world_size * self.context)

    def predict(self, sizes: ParallelSizes) -> Seconds:
        """Return the predicted seconds of a step of a plan."""
        m, passes, head = sizes.microbatches, self.layer(sizes), self._head(sizes)

        def busy(rank: int) -> float:
            layers = layers_of(self.shape, sizes, rank)
            return layers * sum(each.total for each in passes) + 3 * head * has_head(sizes, rank)

        slowest = max(fullest_ranks(sizes), key=busy)
        layers = layers_of(self.shape, sizes, slowest)
        tensor = m * layers * sum(each.tensor for each in passes)
        waiting, messages = self._pipeline(sizes, passes, head, m * busy(slowest))
        forward, *backward = (layers * each.total for each in passes)
        parts = {
            "compute": m * busy(slowest) - tensor,
            "tensor": tensor,
            "bubble": waiting,
            "messages": messages,
            "data": self._data_axis(sizes, forward, sum(backward)),
            "optimizer": self._optimizer(sizes),
        }
        share = self.machine.device.overhead
        return Seconds(**parts, overhead=sum(parts.values()) * share / (1 - share))

    def layer(self, sizes: ParallelSizes) -> tuple[Pass, Pass, Pass]:
        """Return a layer's forward, input gradient and weight gradient for one microbatch.

        Each computes for as long as the others. Recomputation comes before the input gradient.
        """
        per_rank = (sizes.data, sizes.microbatches, sizes.tensor)
        key = (*per_rank, sizes.sequence_parallel, sizes.precision, sizes.recompute)
        if key not in self._layers:
            compute, tensor = self._compute(sizes), self._collectives(sizes)
            times = 2 if sizes.recompute else 1
            backward = Pass(times * compute, times * tensor), Pass(compute, 0.0)
            self._layers[key] = Pass(compute, tensor), *backward
        return self._layers[key]

    def _tokens(self, sizes: ParallelSizes) -> float:
        return tokens_of(self.shape, sizes, self.batch, self.context)

    def _compute(self, sizes: ParallelSizes) -> float:
        """Return the seconds of a layer's forward without communication. Its backward takes twice that."""
        shape, device, t = self.shape, self.machine.device, sizes.tensor
        c = ITEMSIZE[sizes.precision]
        matmuls = 2 * shape.active_weights / t / device.flops(sizes.precision)
        operations = 4 * shape.sequence_length * shape.query_width * (0.5 if shape.fused_attention else 1)
        attention = operations / t / device.attention_flops(sizes.precision)
        return self._tokens(sizes) * (
            matmuls + attention + self._elementwise_bytes(sizes, c) / device.bytes_per_second
        )

    def _elementwise_bytes(self, sizes: ParallelSizes, c: int) -> float:
        """Return the bytes that a layer's forward reads and writes for each token outside matrix products."""
        shape, t = self.shape, sizes.tensor
        mask = 1 if shape.dropout else 0
        # Two norms read and write; two residual branches read two numbers and write one, and a mask.
        replicated = (4 + 6) * shape.width * c + 2 * shape.width * mask
        divided = shape.active_experts * (3 if shape.gated else 2) * shape.inner_width * c
        if not shape.positions:  # rotary embeddings read and write queries and keys
            divided += 2 * (shape.query_width + shape.kv_width) * c
        if not shape.fused_attention:
            # Scores: written by one product; read and written by softmax and by dropout; read by the other.
            divided += shape.num_heads * shape.sequence_length * ((6 if mask else 4) * c + mask)
        return replicated / (t if sizes.sequence_parallel else 1) + divided / t

    def _collectives(self, sizes: ParallelSizes) -> float:
        """Return the seconds of a layer's collectives in the forward; its backward has as many."""
        t, tokens, c = sizes.tensor, self._tokens(sizes), ITEMSIZE[sizes.precision]
        stream, link = tokens * self.shape.width * c, self.machine.link(t, 1)
        if sizes.sequence_parallel:
            around = collective("all_gather", stream, t, link)
            seconds = 2 * (around + collective("reduce_scatter", stream, t, link))
        else:
            seconds = 2 * collective("all_reduce", stream, t, link)
        keys_and_values = tokens * self.context * 2 * self.shape.kv_width / t * c
        link = self.machine.link(self.context, t)
        return seconds + collective("all_gather", keys_and_values, self.context, link)

    def _head(self, sizes: ParallelSizes) -> float:
        """Return the seconds of the head and the loss in the forward; the backward takes twice that."""
        device, c = self.machine.device, ITEMSIZE[sizes.precision]
        each = self.shape.vocab_size / sizes.tensor
        operations = 2 * each * self.shape.width
        return self._tokens(sizes) * (
            operations / device.flops(sizes.precision) + each * (2 * c + 4) / device.bytes_per_second
        )

    def _message(self, sizes: ParallelSizes) -> float:
        """Return the seconds of a message to the next stage: a shard across nodes, then a gather in one."""
        tokens, t = self._tokens(sizes), sizes.tensor
        size = tokens * self.shape.width * ITEMSIZE[sizes.precision]
        link = self.machine.link(2, sizes.data * self.context * t)
        gather = collective("all_gather", size, t, self.machine.link(t, 1))
        gather *= not sizes.sequence_parallel
        return link.alpha + size / t * link.beta + gather

    def _pipeline(
        self, sizes: ParallelSizes, passes: tuple[Pass, Pass, Pass], head: float, busy: float
    ) -> tuple[float, float]:
        """Return the seconds in which the slowest rank, which computes for `busy` seconds, is idle, and those
        in which it waits for messages.

        The simulator knows stages of any length, and takes both together. Long schedules go by formula, for
        ranks that take the mean of all.
        """
        if sizes.pipeline == 1:
            return 0.0, 0.0
        stages, m, message = sizes.num_stages, sizes.microbatches, self._message(sizes)
        if stages * m <= SIMULATED:
            layers = layers_by_stage(self.shape.num_layers, stages)
            heads = [0.0] * (stages - 1) + [head]
            costs = [tuple(n * e.total + h for n, h in zip(layers, heads, strict=True)) for e in passes]
            key = (sizes.schedule, sizes.pipeline, m, sizes.chunks)
            if (key, *costs, message) not in self._makespans:
                timeline = simulate(table_of(*key), Costs(*costs), Link(0.0, message), message_bytes=1)
                self._makespans[key, *costs, message] = timeline.makespan
            return self._makespans[key, *costs, message] - busy, 0.0
        mean = self.shape.num_layers / sizes.pipeline
        seconds = [mean * each.total + head / sizes.pipeline for each in passes]
        idle = theory.idle(sizes.schedule, sizes.pipeline, m, sizes.chunks, *seconds)
        if idle is None:  # zb_v has a formula for any m if all three are equal
            idle = theory.idle(sizes.schedule, sizes.pipeline, m, sizes.chunks, *[sum(seconds) / 3] * 3)
        assert idle is not None
        return idle, 2 * m * stages / sizes.pipeline * message

    def _data_axis(self, sizes: ParallelSizes, forward: float, backward: float) -> float:
        """Return the seconds of the data axis that no computing hides."""
        ranks, m = sizes.data * self.context, sizes.microbatches
        if ranks == 1:
            return 0.0
        link = self.machine.link(ranks, sizes.tensor)
        numbers = max(parameters_of(self.shape, sizes, rank) for rank in fullest_ranks(sizes))
        of_parameter, of_gradient, _ = STATE[sizes.precision]
        layers = max(1.0, layers_of(self.shape, sizes, 0))

        def seconds(op: str, size: float) -> float:
            return layers * collective(op, numbers / layers * size, ranks, link)

        def left(comm: float, hiding: float) -> float:
            return comm if sizes.pipeline > 1 else max(comm - hiding, comm / layers)

        if sizes.zero == 0:
            return left(seconds("all_reduce", of_gradient), backward)
        scatter, gather = seconds("reduce_scatter", of_gradient), seconds("all_gather", of_parameter)
        if sizes.zero == 1:
            return left(scatter, backward) + gather
        if sizes.zero == 2:
            return m * left(scatter, backward) + gather
        return m * (left(gather, forward) + left(gather + scatter, backward))

    def _optimizer(self, sizes: ParallelSizes) -> float:
        numbers = max(parameters_of(self.shape, sizes, rank) for rank in fullest_ranks(sizes))
        shared = sizes.data * self.context if sizes.zero else 1
        return numbers / shared * ADAM_BYTES / self.machine.device.bytes_per_second
