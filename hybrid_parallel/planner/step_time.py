"""Predict the seconds of a training step from the operations, the bytes and the messages of each rank.

    a layer        matrix products and attention: operations / rate; norms, activation functions, residuals
                   and masks: bytes / bandwidth; as long for a forward as for the gradients of inputs and for
                   those of weights; recomputation adds a forward
    tensor axis    all-reduces, or with sequence parallelism as many gathers and scatters
    context axis   ring: messages of keys and values, each behind the attention to one block of keys, and of
                   their gradients, the last of which is not hidden; all-to-all: 4 of them, not hidden
    experts        a token and its result travel to k experts and back, in both passes; nothing is hidden
    pipeline       microbatches * slowest rank, and the idle time of the schedule by its formula; messages
                   of the first microbatch on its way and of the last one on its way back
    data axis      gradients and what ZeRO gathers, a layer at a time; without a pipeline one microbatch hides
                   them, except for one layer's and for the parameters that ZeRO 1 and 2 gather after the step
    - compress     fewer bytes, and the time to compress, which is not hidden
    - sync_every   parameters once in so many steps, and nothing hides them
    optimizer      bytes / bandwidth

A rank does these parts one after the other, so their seconds are added. A collective takes the time of a ring
in comm/cost.py: alpha for each message and beta for each byte. All experts are taken to be chosen equally.

Ranks that share cores compute at the same time, each with its share of a core. They need it for the copies of
the data axis's collectives, too, which nothing hides. Only in a pipeline does one rank compute while another
one waits, so with s seconds of a step if each rank had a core, and w seconds of work for each core, a step
takes (s^4 + w^4)^(1/4): a little more than the longer of both.
"""

from dataclasses import dataclass
from itertools import product

from comm import cost
from comm.cost import Link
from context_parallel.makespan import ring_passes
from hybrid_parallel.planner.machine import Machine
from hybrid_parallel.planner.memory import (
    ITEMSIZE,
    experts_of,
    fullest_ranks,
    has_head,
    layers_of,
    on_a_rank,
    parameters_of,
    state_bytes,
    tokens_of,
)
from hybrid_parallel.planner.shapes import AnyShape, active_weights, flops_per_token
from hybrid_parallel.sizes import ParallelSizes
from low_communication.compressors import BLOCK, ROW
from pipeline_parallel.analysis import theory
from pipeline_parallel.schedules import V_SHAPED

SHARING = 4  # the power above: within 15% of a simulation of the cores' sharing, half within 2.5%
COPIED_BYTES = 4  # a core reads and writes for each byte that a collective sends, as measured here
# A core compresses a number, with error feedback, while it could move so many bytes (benchmarks/planner.py).
COMPRESSING_BYTES = {"bf16": 20, "int8": 100, "topk": 110, "powersgd": 80}
ADAM_BYTES = 28  # read and written for each number: parameter, gradient, both moments

Pass = dict[str, float]
"""Seconds of one microbatch in a layer by cause: of its forward, input gradient or weight gradient."""


@dataclass(frozen=True)
class Seconds:
    """Holds the seconds of a step by cause. Their sum is the time of the step."""

    compute: float  # of the slowest rank, or of the mean rank of a pipeline on shared cores
    tensor: float  # waiting for collectives of the tensor axis
    context: float  # waiting for the tokens of other ranks of the context axis
    experts: float  # waiting for tokens on their way to experts and back
    bubble: float  # the slowest rank is idle in the pipeline
    messages: float  # between stages
    data: float  # collectives of the data axis, without what computation hides
    optimizer: float
    overhead: float  # what no formula predicts (machine.py)

    @property
    def total(self) -> float:
        return sum(vars(self).values())


def collective(op: str, size: float, ranks: int, link: Link, pattern: str = "ring") -> float:
    """Return the seconds of a collective on a full tensor of `size` bytes."""
    return cost.seconds(op, pattern, round(size), ranks, link)


class TimeModel:
    """Predicts the steps of one model on one machine; `batch` counts the examples of a step, on all ranks."""

    def __init__(self, shape: AnyShape, machine: Machine, batch: int) -> None:
        self.shape, self.machine, self.batch = shape, machine, batch

    def utilisation(self, sizes: ParallelSizes, seconds: float, causal: bool = False) -> float:
        """Return the share of the devices' peak rate that the model's own operations take (MFU)."""
        operations = flops_per_token(self.shape, causal) * self.batch * self.shape.block_size
        peak = self.machine.peak_flops[sizes.precision] * self.machine.share
        return operations / (seconds * peak * sizes.world_size)

    def predict(self, sizes: ParallelSizes) -> Seconds:
        """Return the predicted seconds of a step of a plan."""
        m, passes, ends, share = sizes.microbatches, self.layer(sizes), self._ends(sizes), self.machine.share
        waiting = {cause: sum(each[cause] for each in passes) for cause in passes[0]}
        computing = waiting.pop("compute")

        def compute_of(rank: int) -> float:
            """Return the seconds of computing of a rank of the pipeline that has a core or a device."""
            own = ends[0] * (rank == 0) + ends[1] * has_head(sizes, rank)
            return m * (layers_of(self.shape, sizes, rank) * computing + 3 * own)

        slowest = max(fullest_ranks(sizes), key=compute_of)
        compute, layers = compute_of(slowest), layers_of(self.shape, sizes, slowest)
        idle = {axis: m * layers * seconds for axis, seconds in waiting.items()}
        idle |= {"bubble": self._bubble(sizes, passes, ends), "messages": self._messages(sizes)}
        if sizes.pipeline == 1:
            compute /= share
        elif share < 1:  # the cores are never idle while a rank can compute
            alone = compute + sum(idle.values())
            work = self.shape.num_layers * computing + 3 * sum(ends)
            compute = m * work / (sizes.pipeline * share)
            both = (alone**SHARING + compute**SHARING) ** (1 / SHARING)
            step = both if m > 1 else max(alone, compute)  # one alone has nothing to share its core with
            left = (step - compute) / sum(idle.values())
            idle = {cause: seconds * left for cause, seconds in idle.items()}
        hiding = [layers * (sum(each.values()) + each["compute"] * (1 / share - 1)) for each in passes]
        parts = {
            "compute": compute,
            **idle,
            "data": self._data(sizes, slowest, hiding[0], sum(hiding[1:])),
            "optimizer": self._optimizer(sizes, slowest),
        }
        overhead = self.machine.overhead
        return Seconds(**parts, overhead=sum(parts.values()) * overhead / (1 - overhead))

    def layer(self, sizes: ParallelSizes) -> tuple[Pass, Pass, Pass]:
        """Return a layer's forward, input gradient (with recomputation) and weight gradient."""
        compute, tensor, experts = self._compute(sizes), self._tensor(sizes), self._experts(sizes)
        forward, backward = (
            {"compute": compute, "tensor": tensor, "context": context, "experts": experts}
            for context in self._context(sizes)
        )
        backward = {cause: seconds + sizes.recompute * forward[cause] for cause, seconds in backward.items()}
        added = 3 * self._reading(sizes) * (sizes.microbatches > 1)  # to earlier microbatches' gradients
        return forward, backward, dict.fromkeys(forward, 0.0) | {"compute": compute + added}

    def _tokens(self, sizes: ParallelSizes) -> float:
        return tokens_of(self.shape, sizes, self.batch)  # of a microbatch on a rank

    def _stream(self, sizes: ParallelSizes) -> float:
        """Return the bytes of a microbatch's activations between two layers."""
        return self._tokens(sizes) * self.shape.width * ITEMSIZE[sizes.precision]

    def _rate(self, sizes: ParallelSizes) -> float:
        """Return the operations per second of matrix products."""
        return self.machine.peak_flops[sizes.precision] * self.machine.matmul_share

    def _compute(self, sizes: ParallelSizes) -> float:
        """Return the seconds of a layer's forward without communication. Its backward takes twice that."""
        matmuls = 2 * active_weights(self.shape) / sizes.tensor / self._rate(sizes)
        moved = on_a_rank(self.shape.moved_bytes(ITEMSIZE[sizes.precision]), sizes) / self.machine.bandwidth
        return self._reading(sizes) + self._tokens(sizes) * (matmuls + moved) + self._attention(sizes)

    def _attention(self, sizes: ParallelSizes) -> float:
        """Return the seconds of the scores and the sums of a layer's attention in the forward."""
        rate = self.machine.peak_flops[sizes.precision] * self.machine.attention_share
        operations = 4 * self.shape.block_size * self.shape.query_width
        skipped = 0.5 if self.shape.fused_attention else 1
        return self._tokens(sizes) * operations * skipped / sizes.tensor / rate

    def _reading(self, sizes: ParallelSizes) -> float:
        """Return the seconds in which a core reads a layer's parameters; a GPU reads while it multiplies."""
        if self.machine.cores is None:
            return 0.0
        numbers = self.shape.dense_parameters + self.shape.expert_parameters / sizes.expert_ranks
        return numbers / sizes.tensor * ITEMSIZE[sizes.precision] / self.machine.bandwidth

    def _tensor(self, sizes: ParallelSizes) -> float:
        """Return the seconds of the tensor axis in a layer's forward, and as many in its backward."""
        ops = ("all_gather", "reduce_scatter") if sizes.sequence_parallel else ("all_reduce",)
        t, link = sizes.tensor, self.machine.ring_link(sizes.tensor, 1)
        return self.shape.reductions * sum(collective(op, self._stream(sizes), t, link) for op in ops)

    def _context(self, sizes: ParallelSizes) -> tuple[float, float]:
        """Return the seconds of the context axis in a layer's forward and backward that are not hidden."""
        n, link = sizes.context, self.machine.link(sizes.context, sizes.tensor)
        if n == 1:
            return 0.0, 0.0
        of_number = (
            self._tokens(sizes) / sizes.tensor * ITEMSIZE[sizes.precision]
        )  # bytes, for each of a token
        queries, keys = of_number * self.shape.query_width, of_number * 2 * self.shape.kv_width  # and values
        if sizes.attention == "all_to_all":
            there, back = queries + keys, queries
            seconds = sum(collective("all_to_all", each, n, link, "pairwise") for each in (there, back))
            return seconds, seconds
        attention = self._attention(sizes) / self.machine.share
        forward, backward = ring_passes([attention / n] * n, link.alpha + keys * link.beta)
        return max(0.0, forward - attention), max(0.0, backward - 2 * attention)

    def _experts(self, sizes: ParallelSizes) -> float:
        """Return the seconds that a layer's forward takes to send tokens to experts, and its backward again.

        Two all-to-alls send k copies of the tokens and their results. The ranks of the tensor axis all send
        the same tokens; with sequence parallelism, in other programs, each sends its own.
        """
        e, link = sizes.expert_ranks, self.machine.link(sizes.expert_ranks, sizes.tensor)
        sent = on_a_rank((0.0, self._stream(sizes)), sizes) * self.shape.active_experts
        return 2 * collective("all_to_all", sent, e, link, "pairwise")

    def _ends(self, sizes: ParallelSizes) -> tuple[float, float]:
        """Return the forward's seconds before the layers, and after them for the head and the loss."""
        first, last = (2 * weights / self._rate(sizes) for weights in self.shape.end_weights)
        last += self.shape.vocab_size * (2 * ITEMSIZE[sizes.precision] + 4) / self.machine.bandwidth
        tokens = self._tokens(sizes) / sizes.tensor
        return tokens * first, tokens * last

    def _bubble(self, sizes: ParallelSizes, passes: tuple[Pass, ...], ends: tuple[float, float]) -> float:
        """Return the idle seconds of the ranks of a pipeline, as if all were as fast as their mean."""
        p = sizes.pipeline
        seconds = [(self.shape.num_layers * sum(each.values()) + sum(ends)) / p for each in passes]
        if sizes.schedule in V_SHAPED:  # their formulas are for equal ones
            seconds = [sum(seconds) / 3] * 3
        idle = theory.idle(sizes.schedule, p, sizes.microbatches, sizes.chunks, *seconds)
        assert idle is not None
        return idle

    def _messages(self, sizes: ParallelSizes) -> float:
        """Return the seconds of messages between stages that no computation hides.

        These are those of the first microbatch on its way, and of the last one on its way back. With 1F1B and
        the naive schedule a stage waits for a way and back each time that it has used up the microbatches
        that it may hold. With the others it has something else to compute meanwhile.
        """
        p, m, t = sizes.pipeline, sizes.microbatches, sizes.tensor
        if p == 1:
            return 0.0
        link = self.machine.link(2, sizes.replicas * t)
        once = 2 * (sizes.num_stages - 1) * (link.alpha + self._stream(sizes) / t * link.beta)
        waits = sizes.schedule in ("naive", "1f1b")
        return once * m / theory.held(sizes.schedule, p, m, sizes.chunks, 0) if waits else once

    def _data(self, sizes: ParallelSizes, rank: int, forward: float, backward: float) -> float:
        """Return the seconds of the data axis's collectives that no computation hides.

        All n replicas reduce gradients; those of an expert only the n/e replicas that hold it.
        """
        n, e, m, machine = sizes.replicas, sizes.expert_ranks, sizes.microbatches, self.machine
        own, layers = experts_of(self.shape, sizes, rank), layers_of(self.shape, sizes, rank)
        # The numbers that are reduced together, the ranks that do so, and how far these are apart.
        dense = parameters_of(self.shape, sizes, rank) - own
        parts = [(dense, n, sizes.tensor), (own, n // e, e * sizes.tensor)]
        of_parameter, of_gradient, _ = state_bytes(sizes, machine.autocast)
        copying = Link(0.0, COPIED_BYTES / machine.bandwidth / machine.share * (machine.cores is not None))

        def left(ops: list[tuple[str, float]], hiding: float) -> float:
            """Return the seconds of all layers' collectives that `hiding` seconds of work do not hide."""
            comm = copies = 0.0
            for (op, size), (numbers, ranks, stride) in product(ops, parts):
                if numbers:
                    layer = numbers / layers * size
                    comm += layers * collective(op, layer, ranks, machine.ring_link(ranks, stride))
                    copies += layers * collective(op, layer, ranks, copying)
            return copies + (comm if sizes.pipeline > 1 else max(comm - hiding, comm / layers))

        if sizes.sync_every > 1:
            return left([("all_reduce", of_parameter)], 0.0) / sizes.sync_every
        if sizes.compress:
            moved = dense * COMPRESSING_BYTES[sizes.compress] / machine.bandwidth / machine.share
            return moved + left([self._compressed(sizes)], backward)
        if sizes.zero == 0:
            return left([("all_reduce", of_gradient)], backward)
        scatter, gather = ("reduce_scatter", of_gradient), ("all_gather", of_parameter)
        if sizes.zero == 3:
            return m * (left([gather], forward) + left([gather, scatter], backward))
        return (m if sizes.zero == 2 else 1) * left([scatter], backward) + left([gather], 0.0)

    def _compressed(self, sizes: ParallelSizes) -> tuple[str, float]:
        """Return the collective of compressed gradients, and its bytes for each number (compressors.py)."""
        shape, columns = self.shape, 4
        # Of a layer's matrices one side is the width, and the tensor axis divides the other side.
        sides = shape.matrices * shape.width * sizes.tensor / shape.dense_parameters + 1 / shape.width
        return {
            "bf16": ("all_reduce", 2.0),
            "int8": ("all_reduce", ROW / BLOCK),  # its all-to-all and all-gather send as much
            "topk": ("all_gather", sizes.replicas * 0.01 * 8),
            "powersgd": ("all_reduce", 4.0 * columns * sides),
        }[sizes.compress or "bf16"]

    def _optimizer(self, sizes: ParallelSizes, rank: int) -> float:
        """Return the seconds in which a rank changes the parameters whose optimizer state it has."""
        owners = sizes.replicas if sizes.zero else 1
        moved = parameters_of(self.shape, sizes, rank) / owners * ADAM_BYTES
        return moved / self.machine.bandwidth / self.machine.share
