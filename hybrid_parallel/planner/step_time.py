"""Predict the seconds of a training step from the operations, the bytes and the messages of each rank.

    a layer        matrix products and attention: operations / rate; norms, activation functions, residuals
                   and masks: bytes / bandwidth; as long for a forward as for the gradients of inputs and for
                   those of weights; recomputation adds a forward
    tensor axis    2 all-reduces in the forward and 2 in the backward of a layer, with experts 1 for attention
                   and 1 for each expert of a token; or as many gathers and scatters with sequence parallelism
    context axis   ring: messages of keys and values, each behind the attention to one block of keys, and of
                   their gradients, the last of which is not hidden; all-to-all: 4 of them, not hidden
    experts        a token and its result travel to k experts and back, in both passes; nothing is hidden
    pipeline       microbatches * slowest rank, and the idle time of the schedule from the simulator; for long
                   schedules from a formula, and then the time of the messages between stages is added
    data axis      gradients and what ZeRO gathers, a layer at a time; without a pipeline one microbatch hides
                   them, except for one layer's and for the parameters that ZeRO 1 and 2 gather after the step
    optimizer      bytes / bandwidth
    overhead       the share of a step that is in none of these, one number for all GPUs (machine.py)

A rank does these parts one after the other, so their seconds are added. A collective takes the time of a ring
in comm/cost.py: alpha for each message and beta for each byte. The lessons' formulas count the bytes; those
to experts assume that all are chosen equally often.

Ranks that share cores compute at the same time, each with its share of a core. Collectives need cores, too:
the time that a rank spends on calls, copies and sums counts as computing, the rest as waiting. Only in a
pipeline does one rank compute while another one waits, so with s seconds of a step if each rank had a core,
and w seconds of work for each core, a step takes (s^4 + w^4)^(1/4): a little more than the longer of both.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, fields
from functools import cache

from comm import cost
from comm.cost import Link
from context_parallel.makespan import ring_passes
from hybrid_parallel.planner.machine import Machine
from hybrid_parallel.planner.memory import (
    ITEMSIZE,
    experts_of,
    fullest_ranks,
    has_head,
    layers_by_stage,
    layers_of,
    parameters_of,
    state_bytes,
    tokens_of,
)
from hybrid_parallel.planner.shapes import AnyShape
from hybrid_parallel.sizes import ParallelSizes
from pipeline_parallel.analysis import theory
from pipeline_parallel.analysis.simulate import Costs, simulate
from pipeline_parallel.schedules import table_of

SIMULATED = 128  # stages * microbatches of the longest schedule that is simulated
SHARING = (
    4  # the power above: within 15% of a simulation of the cores' sharing, half of the cases within 2.5%
)
ADAM_BYTES = 28  # read and written for each number: parameter, gradient, both moments
ADDED_BYTES = 12  # for each number of a ring's float32 sums: read it and the summand, and write it
COUNT_BYTES = 8  # of the number of tokens that a rank sends to an expert
_table_of = cache(table_of)


@dataclass(frozen=True)
class Seconds:
    """Holds the seconds of a step by cause. Their sum is the time of the step."""

    compute: float  # of the slowest rank, or of the mean rank of a pipeline on shared cores
    tensor: float  # waiting for collectives of the tensor axis
    context: float  # waiting for the tokens of other ranks of the context axis
    experts: float  # waiting for tokens on their way to experts and back
    bubble: float  # the slowest rank is idle in the pipeline
    messages: float  # between stages, where the bubble does not include them
    data: float  # collectives of the data axis, without what computation hides
    optimizer: float
    overhead: float  # what no formula predicts (machine.py)

    @property
    def total(self) -> float:
        """Return the seconds of the step."""
        return sum(vars(self).values())


@dataclass(frozen=True)
class Pass:
    """Holds the seconds of one layer's forward, input gradient or weight gradient, for one microbatch."""

    compute: float = 0.0  # recomputation included
    tensor: float = 0.0  # waiting, as in Seconds
    context: float = 0.0
    experts: float = 0.0

    @property
    def waiting(self) -> float:
        """Return the seconds in which a core could do something else."""
        return self.tensor + self.context + self.experts

    @property
    def total(self) -> float:
        """Return the sum of all parts."""
        return self.compute + self.waiting

    def __add__(self, other: "Pass") -> "Pass":
        return Pass(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(Pass)))


def _waiting_for(axis: str, seconds: float, handling: float) -> Pass:
    """Return a pass that waits for a collective of an axis; a core works for `handling` of its seconds."""
    return Pass(handling, **{axis: max(0.0, seconds - handling)})


def collective(op: str, size: float, ranks: int, link: Link, pattern: str = "ring") -> float:
    """Return the seconds of a collective on a full tensor of `size` bytes."""
    return cost.seconds(op, pattern, round(size), ranks, link)


class TimeModel:
    """Predicts the steps of one model on one machine; `batch` counts the examples of a step, on all ranks."""

    def __init__(self, shape: AnyShape, machine: Machine, batch: int) -> None:
        self.shape, self.machine, self.batch = shape, machine, batch
        self._layers: dict[Hashable, tuple[Pass, Pass, Pass]] = {}
        self._makespans: dict[Hashable, float] = {}

    def utilisation(self, sizes: ParallelSizes, seconds: float, causal: bool = False) -> float:
        """Return the share of the devices' peak rate that the model's own operations take (MFU)."""
        operations = self.shape.flops_per_token(causal) * self.batch * self.shape.sequence_length
        peak = self.machine.device.peak_flops[sizes.precision] * self.machine.share
        return operations / (seconds * peak * sizes.world_size)

    def predict(self, sizes: ParallelSizes) -> Seconds:
        """Return the predicted seconds of a step of a plan."""
        m, passes, ends, share = sizes.microbatches, self.layer(sizes), self._ends(sizes), self.machine.share

        def busy(rank: int) -> float:
            own = ends[0] * (rank == 0) + ends[1] * has_head(sizes, rank)
            return layers_of(self.shape, sizes, rank) * sum(each.total for each in passes) + 3 * own

        slowest = max(fullest_ranks(sizes), key=busy)
        layers = layers_of(self.shape, sizes, slowest)
        axes = ("tensor", "context", "experts")
        waits = {axis: m * layers * sum(getattr(each, axis) for each in passes) for axis in axes}
        waiting = sum(waits.values())
        compute = (m * busy(slowest) - waiting) / share
        if share < 1 and sizes.pipeline > 1:  # the cores are never idle while a rank can compute
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
            "messages": messages,
            "data": self._data(sizes, forward, sum(backward)),
            "optimizer": self._optimizer(sizes),
        }
        overhead = self.machine.device.overhead
        return Seconds(**parts, overhead=sum(parts.values()) * overhead / (1 - overhead))

    def layer(self, sizes: ParallelSizes) -> tuple[Pass, Pass, Pass]:
        """Return a layer's forward, input gradient (with recomputation) and weight gradient."""
        axes = (sizes.data, sizes.context, sizes.attention, sizes.tensor, sizes.expert_ranks)
        key = (*axes, sizes.microbatches, sizes.sequence_parallel, sizes.precision, sizes.recompute)
        if key not in self._layers:
            compute = self._compute(sizes)
            forward = backward = Pass(compute)
            ways = self._tensor(sizes, compute), self._context(sizes), self._experts(sizes)
            for more_forward, more_backward in ways:
                forward, backward = forward + more_forward, backward + more_backward
            if sizes.recompute:
                backward += forward
            added = 3 * self._reading(sizes) * (sizes.microbatches > 1)  # to earlier microbatches' gradients
            self._layers[key] = forward, backward, Pass(compute + added)
        return self._layers[key]

    def _numbers(self, sizes: ParallelSizes) -> tuple[float, int]:
        """Return the tokens of a rank in a microbatch, and the bytes of a number that it computes."""
        return tokens_of(self.shape, sizes, self.batch), ITEMSIZE[sizes.precision]

    def _compute(self, sizes: ParallelSizes) -> float:
        """Return the seconds of a layer's forward without communication. Its backward takes twice that."""
        (tokens, c), device = self._numbers(sizes), self.machine.device
        matmuls = 2 * self.shape.active_weights / sizes.tensor / device.flops(sizes.precision)
        moved = self.shape.moved_bytes(c).on_a_rank(sizes.tensor, sizes.sequence_parallel)
        of_tokens = tokens * (matmuls + moved / device.bytes_per_second)
        return device.layer_seconds + self._reading(sizes) + of_tokens + self._attention(sizes)

    def _attention(self, sizes: ParallelSizes) -> float:
        """Return the seconds of the scores and the sums of a layer's attention in the forward."""
        shape, (tokens, _) = self.shape, self._numbers(sizes)
        operations = 4 * shape.sequence_length * shape.query_width * (0.5 if shape.fused_attention else 1)
        return tokens * operations / sizes.tensor / self.machine.device.attention_flops(sizes.precision)

    def _reading(self, sizes: ParallelSizes) -> float:
        """Return the seconds in which a core reads a layer's parameters; a GPU reads while it multiplies."""
        if self.machine.cores is None:
            return 0.0
        numbers = sum(self.shape.dense_parameters) + sum(self.shape.expert_parameters) / sizes.expert_ranks
        return numbers / sizes.tensor * ITEMSIZE[sizes.precision] / self.machine.device.bytes_per_second

    def _tensor(self, sizes: ParallelSizes, compute: float) -> tuple[Pass, Pass]:
        """Return what the tensor axis adds to a layer's forward and backward.

        On this machine column-parallel layers hide collectives in the backward: the reduction of the input's
        gradient behind the weight's gradient, which takes its share of `compute` seconds; with sequence
        parallelism also a second gather of the input, behind the input's gradient.
        """
        shape, machine, t = self.shape, self.machine, sizes.tensor
        if t == 1:
            return Pass(), Pass()
        tokens, c = self._numbers(sizes)
        stream, link, n = tokens * shape.width * c, machine.link(t, 1), shape.reductions
        ops = ("all_gather", "reduce_scatter") if sizes.sequence_parallel else ("all_reduce",)
        each = [n * collective(op, stream, t, link) for op in ops]
        handling = machine.handling.seconds(n * len(ops), n * 2 * (t - 1) / t * stream)
        forward = _waiting_for("tensor", sum(each), handling)
        if not machine.hides_reductions:
            return forward, forward
        hiding = shape.column_weights / shape.active_weights * compute / machine.share
        exposed = sum(max(0.0, seconds - hiding) for seconds in each)
        if sizes.sequence_parallel:
            exposed, handling = exposed + each[0], handling * 1.5
        return forward, _waiting_for("tensor", exposed, handling)

    def _context(self, sizes: ParallelSizes) -> tuple[Pass, Pass]:
        """Return what the context axis adds to a layer's forward and backward: context_parallel/cost.py."""
        shape, machine, n, t = self.shape, self.machine, sizes.context, sizes.tensor
        if n == 1:
            return Pass(), Pass()
        tokens, c = self._numbers(sizes)
        queries, keys = tokens * shape.query_width / t, tokens * 2 * shape.kv_width / t  # keys and values
        bandwidth = machine.device.bytes_per_second
        if sizes.attention == "all_to_all":
            link, numbers = machine.pairwise_link(n, t), (queries + keys, queries)  # there, and back
            seconds = sum(collective("all_to_all", each * c, n, link, "pairwise") for each in numbers)
            handling = machine.handling.seconds(2, (n - 1) / n * sum(numbers) * c)
            copying = 2 * 2 * sum(numbers) * c / bandwidth  # read and written, when sent and when received
            both = _waiting_for("context", seconds, handling) + Pass(copying)
            return both, both
        # A message of the ring between two nodes goes through one network card.
        link = machine.inner if machine.is_one_node(n, t) else machine.outer
        handling = machine.handling.seconds(1, keys * c)
        message = max(0.0, link.alpha + keys * c * link.beta - handling)
        blocks = [self._attention(sizes) / n / machine.share] * n  # the seconds of each step of the ring
        forward, backward = ring_passes(blocks, message)
        adding = n * ADDED_BYTES / bandwidth  # each block's result, to a sum in float32
        return (
            Pass((n - 1) * handling + adding * queries, context=max(0.0, forward - sum(blocks))),
            Pass(
                2 * (n - 1) * handling + adding * (queries + keys),
                context=max(0.0, backward - 2 * sum(blocks)),
            ),
        )

    def _experts(self, sizes: ParallelSizes) -> tuple[Pass, Pass]:
        """Return what sending tokens to experts adds to a layer's forward and backward.

        After an all-gather of counts, two all-to-alls send k copies of the tokens and their results. The
        ranks of the tensor axis all send the same tokens; with sequence parallelism, in other programs, each
        sends its own.
        """
        shape, machine, n, e = self.shape, self.machine, sizes.replicas, sizes.expert_ranks
        if shape.experts == 1 or n == 1:
            return Pass(), Pass()
        (tokens, c), sending = self._numbers(sizes), Pass()
        if e > 1:
            own = tokens / (sizes.tensor if sizes.sequence_parallel else 1)
            size, link = own * shape.active_experts * shape.width * c, machine.pairwise_link(e, sizes.tensor)
            once = collective("all_to_all", size, e, link, "pairwise")
            once += (e - 1).bit_length() * link.alpha  # the parts' sizes are exchanged first
            handling = machine.handling.seconds(2, 2 * (e - 1) / e * size)
            sending = _waiting_for("experts", 2 * once, handling)
        size, link = COUNT_BYTES * shape.experts * n, machine.pairwise_link(n, sizes.tensor)
        seconds = collective("all_gather", size, n, link, "bruck")
        counts = _waiting_for("experts", seconds, machine.handling.seconds(1, size * (1 - 1 / n)))
        return sending + counts, sending

    def _ends(self, sizes: ParallelSizes) -> tuple[float, float]:
        """Return the forward's seconds before the layers, and after them for the head and the loss."""
        device, (tokens, c) = self.machine.device, self._numbers(sizes)
        first, last = (2 * weights / device.flops(sizes.precision) for weights in self.shape.end_weights)
        last += self.shape.last_numbers[1] * (2 * c + 4) / device.bytes_per_second
        return tokens / sizes.tensor * first, tokens / sizes.tensor * last

    def _pipeline(
        self, sizes: ParallelSizes, passes: tuple[Pass, Pass, Pass], ends: tuple[float, float], busy: float
    ) -> tuple[float, float]:
        """Return the slowest rank's idle seconds beside `busy` ones, and its seconds of waiting for messages.

        The simulator's idle time includes the messages. The formula for long schedules takes the ranks' mean.
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

    def _message(self, sizes: ParallelSizes) -> float:
        """Return the seconds of a message to the next stage: a shard from each tensor rank, and a gather."""
        (tokens, c), t = self._numbers(sizes), sizes.tensor
        size, link = tokens * self.shape.width * c, self.machine.link(2, sizes.replicas * t)
        gather = (
            0.0 if sizes.sequence_parallel else collective("all_gather", size, t, self.machine.link(t, 1))
        )
        return link.alpha + size / t * link.beta + gather

    def _simulated(
        self, sizes: ParallelSizes, passes: tuple[Pass, Pass, Pass], ends: tuple[float, float], message: float
    ) -> float:
        """Return the makespan of the pipeline, with its messages, in seconds."""
        stages, share = sizes.num_stages, self.machine.share
        layers = layers_by_stage(self.shape.num_layers, stages)
        at_ends = [ends[0], *[0.0] * (stages - 2), ends[1]]

        def costs(seconds: Callable[[Pass], float]) -> Costs:
            return Costs(
                *(tuple(n * seconds(e) + end for n, end in zip(layers, at_ends, strict=True)) for e in passes)
            )

        plan = (sizes.schedule, sizes.pipeline, sizes.microbatches, sizes.chunks)
        alone, key = costs(lambda e: e.total), (plan, passes, ends, message, share)
        if key not in self._makespans:
            seconds = simulate(_table_of(*plan), alone, Link(0.0, message), 1).makespan
            if share < 1:
                work = sizes.microbatches * sum(map(sum, vars(costs(lambda e: e.compute)).values()))
                both = seconds, work / share / sizes.pipeline
                several = sizes.microbatches > 1  # one alone has nothing to share its core with
                seconds = sum(each**SHARING for each in both) ** (1 / SHARING) if several else max(both)
            self._makespans[key] = seconds
        return self._makespans[key]

    def _data(self, sizes: ParallelSizes, forward: float, backward: float) -> float:
        """Return the seconds of the data axis's collectives that no computation hides.

        All n replicas reduce gradients; those of an expert only the n/e replicas that hold it.
        """
        if sizes.replicas == 1:
            return 0.0
        rank, m, machine = self._fullest(sizes), sizes.microbatches, self.machine
        own, layers = experts_of(self.shape, sizes, rank), max(1.0, layers_of(self.shape, sizes, 0))
        e = sizes.expert_ranks if own else 1
        # The numbers that are reduced together, the ranks that do so, and how far these are apart.
        parts = [(parameters_of(self.shape, sizes, rank), sizes.replicas, sizes.tensor)]
        if e > 1:
            parts = [(parts[0][0] - own, *parts[0][1:]), (own, sizes.replicas // e, e * sizes.tensor)]
        of_parameter, of_gradient, _ = state_bytes(sizes, machine.autocast)

        def seconds(op: str, size: float) -> tuple[float, float]:
            """Return the seconds of the collectives of all layers, and those of a core for their copies."""
            comm = copies = 0.0
            for numbers, ranks, stride in parts:
                link = machine.link(ranks, stride)
                each = layers * collective(op, numbers / layers * size, ranks, link)
                comm += each
                copies += each / link.beta * machine.handling.byte / machine.share if link.beta else 0.0
            return comm, copies

        def left(ops: list[tuple[float, float]], hiding: float) -> float:
            """Return the seconds of collectives that `hiding` seconds of computing do not hide."""
            comm, copies = map(sum, zip(*ops, strict=True))
            return comm + copies if sizes.pipeline > 1 else max(comm - hiding, comm / layers) + copies

        if sizes.zero == 0:
            return left([seconds("all_reduce", of_gradient)], backward)
        scatter, gather = seconds("reduce_scatter", of_gradient), seconds("all_gather", of_parameter)
        if sizes.zero == 3:
            return m * (left([gather], forward) + left([gather, scatter], backward))
        return (m if sizes.zero == 2 else 1) * left([scatter], backward) + gather[0]

    def _optimizer(self, sizes: ParallelSizes) -> float:
        """Return the seconds in which a rank changes the parameters whose optimizer state it has."""
        numbers = parameters_of(self.shape, sizes, self._fullest(sizes))
        owners = sizes.replicas if sizes.zero else 1
        return numbers / owners * ADAM_BYTES / self.machine.device.bytes_per_second / self.machine.share

    def _fullest(self, sizes: ParallelSizes) -> int:
        return max(fullest_ranks(sizes), key=lambda rank: parameters_of(self.shape, sizes, rank))
