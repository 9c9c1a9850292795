"""Predict the seconds of a training step from the operations, the bytes and the messages of each rank.

A rank does the parts of `Seconds` one after the other, so they are added. A collective takes the time of a
ring in comm/cost.py: alpha for each message and beta for each byte. All experts are taken to be equally busy.

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
from hybrid_parallel.planner import memory
from hybrid_parallel.planner.machine import Machine
from hybrid_parallel.planner.memory import ITEMSIZE, STATE, has_head, num_layers_of, on_a_rank
from hybrid_parallel.planner.shapes import ModelShape, active_weights, flops_per_token
from hybrid_parallel.sizes import ParallelSizes
from pipeline_parallel.analysis import theory
from pipeline_parallel.schedules import V_SHAPED

SHARING = 4  # the power above: within 15% of a simulation of the cores' sharing, half within 2.5%
COPIED_BYTES = 4  # a core reads and writes for each byte that a collective sends, as measured here
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

    def __init__(self, shape: ModelShape, machine: Machine, batch: int) -> None:
        self.shape, self.machine, self.batch = shape, machine, batch

    def utilisation(self, sizes: ParallelSizes, seconds: float, causal: bool = False) -> float:
        """Return the share of the devices' peak rate that the model's own operations take (MFU)."""
        operations = flops_per_token(self.shape, causal) * self.batch * self.shape.block_size
        peak = self.machine.peak_flops[sizes.precision] * self.machine.share
        return operations / (seconds * peak * sizes.world_size)

    def predict(self, sizes: ParallelSizes) -> Seconds:
        """Return the predicted seconds of a step of a plan."""
        m, share = sizes.microbatches, self.machine.share
        passes, head = self.layer(sizes), self._head(sizes)
        waiting = {cause: sum(each[cause] for each in passes) for cause in passes[0]}
        computing = waiting.pop("compute")

        def compute_of(rank: int) -> float:
            """Return the seconds of computing of a rank of the pipeline that has a core or a device."""
            return m * (num_layers_of(self.shape, sizes, rank) * computing + 3 * head * has_head(sizes, rank))

        slowest = max(memory.fullest_ranks(sizes), key=compute_of)
        compute, layers = compute_of(slowest), num_layers_of(self.shape, sizes, slowest)
        idle = {axis: m * layers * seconds for axis, seconds in waiting.items()}
        idle |= {"bubble": self._bubble(sizes, passes, head), "messages": self._messages(sizes)}
        if sizes.pipeline == 1:
            compute /= share
        elif share < 1:  # the cores are never idle while a rank can compute
            alone = compute + sum(idle.values())
            compute = m * (self.shape.num_layers * computing + 3 * head) / (sizes.pipeline * share)
            both = (alone**SHARING + compute**SHARING) ** (1 / SHARING)
            step = both if m > 1 else max(alone, compute)  # one alone has nothing to share its core with
            left = (step - compute) / sum(idle.values())
            idle = {cause: seconds * left for cause, seconds in idle.items()}
        hiding = [layers * (sum(each.values()) + each["compute"] * (1 / share - 1)) for each in passes]
        data = self._data(sizes, slowest, hiding[0], hiding[1] + hiding[2])
        owned = memory.num_parameters_of(self.shape, sizes, slowest) / (sizes.replicas if sizes.zero else 1)
        optimizer = owned * ADAM_BYTES / self.machine.bandwidth / share
        parts = {"compute": compute, **idle, "data": data, "optimizer": optimizer}
        overhead = self.machine.overhead
        return Seconds(**parts, overhead=sum(parts.values()) * overhead / (1 - overhead))

    def layer(self, sizes: ParallelSizes) -> tuple[Pass, Pass, Pass]:
        """Return a layer's forward, input gradient (with recomputation) and weight gradient, which compute
        equally long."""
        compute, tensor, experts = self._compute(sizes), self._tensor(sizes), self._experts(sizes)
        forward, backward = (
            {"compute": compute, "tensor": tensor, "context": context, "experts": experts}
            for context in self._context(sizes)
        )
        backward = {cause: seconds + sizes.recompute * forward[cause] for cause, seconds in backward.items()}
        added = 3 * self._reading(sizes) * (sizes.microbatches > 1)  # to earlier microbatches' gradients
        return forward, backward, dict.fromkeys(forward, 0.0) | {"compute": compute + added}

    def _tokens(self, sizes: ParallelSizes) -> float:
        return memory.tokens_of(self.shape, sizes, self.batch)  # of a microbatch on a rank

    def _stream(self, sizes: ParallelSizes) -> float:
        """Return the bytes of a microbatch's activations between two layers."""
        return self._tokens(sizes) * self.shape.width * ITEMSIZE[sizes.precision]

    def _compute(self, sizes: ParallelSizes) -> float:
        """Return the seconds of a layer's forward without communication: operations of products over their
        rate, and bytes over the bandwidth for norms, activation functions, residuals and masks."""
        rate = self.machine.peak_flops[sizes.precision] * self.machine.matmul_share
        matmuls = 2 * active_weights(self.shape) / sizes.tensor / rate
        moved = on_a_rank(self.shape.moved_bytes(ITEMSIZE[sizes.precision]), sizes) / self.machine.bandwidth
        return self._reading(sizes) + self._tokens(sizes) * (matmuls + moved) + self._attention(sizes)

    def _attention(self, sizes: ParallelSizes) -> float:
        """Return the seconds of the scores and the sums of a layer's attention in the forward."""
        rate = self.machine.peak_flops[sizes.precision] * self.machine.attention_share
        operations = 4 * self.shape.block_size * self.shape.width
        skipped = 0.5 if self.shape.fused_attention else 1
        return self._tokens(sizes) * operations * skipped / sizes.tensor / rate

    def _reading(self, sizes: ParallelSizes) -> float:
        """Return the seconds in which a core reads a layer's parameters; a GPU reads while it multiplies."""
        if self.machine.cores is None:
            return 0.0
        numbers = self.shape.dense_parameters + self.shape.expert_parameters / sizes.expert_ranks
        return numbers / sizes.tensor * ITEMSIZE[sizes.precision] / self.machine.bandwidth

    def _reduction(self, op: str, size: float, ranks: int, stride: int) -> float:
        """Return the seconds of an all-reduce or a half of one among ranks that are `stride` apart."""
        machine, link = self.machine, self.machine.ring_link(ranks, stride)
        if machine.cores is not None:  # rings of this workbook
            return collective(op, size, ranks, link)
        nodes = -(-ranks // max(1, min(ranks, machine.devices_per_node // stride)))
        return cost.seconds_of_trees(op, round(size), ranks, nodes, machine.inner, link)

    def _tensor(self, sizes: ParallelSizes) -> float:
        """Return the seconds of the tensor axis in a layer's forward, and as many in its backward."""
        ops = ("all_gather", "reduce_scatter") if sizes.sequence_parallel else ("all_reduce",)
        once = sum(self._reduction(op, self._stream(sizes), sizes.tensor, 1) for op in ops)
        return (1 + self.shape.active_experts) * once  # after attention and after each expert

    def _context(self, sizes: ParallelSizes) -> tuple[float, float]:
        """Return the seconds of the context axis in a layer's forward and backward that are not hidden.

        In a ring the attention to a block of keys and values hides the message of the next one. Of the
        gradients' messages the last is not hidden, and of the all-to-alls none.
        """
        n, link = sizes.context, self.machine.link(sizes.context, sizes.tensor)
        if n == 1:
            return 0.0, 0.0
        queries = self._stream(sizes) / sizes.tensor  # bytes
        keys = queries / self.shape.width * 2 * self.shape.kv_width  # and values
        if sizes.attention == "all_to_all":
            sent = queries + keys, queries  # the results are as large as queries
            seconds = sum(collective("all_to_all", size, n, link, "pairwise") for size in sent)
            return seconds, seconds
        attention = self._attention(sizes) / self.machine.share
        forward, backward = ring_passes([attention / n] * n, link.alpha + keys * link.beta)
        return max(0.0, forward - attention), max(0.0, backward - 2 * attention)

    def _experts(self, sizes: ParallelSizes) -> float:
        """Return the seconds of two all-to-alls: a layer's forward sends tokens to experts, and back."""
        # All ranks of the tensor axis send the same tokens, unless (in other programs) they divide tokens.
        e, link = sizes.expert_ranks, self.machine.link(sizes.expert_ranks, sizes.tensor)
        sent = on_a_rank((0.0, self._stream(sizes)), sizes) * self.shape.active_experts
        return 2 * collective("all_to_all", sent, e, link, "pairwise")

    def _head(self, sizes: ParallelSizes) -> float:
        """Return the forward's seconds of the head and the loss."""
        rate = self.machine.peak_flops[sizes.precision] * self.machine.matmul_share
        logits = self.shape.vocab_size * (2 * ITEMSIZE[sizes.precision] + 4) / self.machine.bandwidth
        return self._tokens(sizes) / sizes.tensor * (2 * self.shape.head_parameters / rate + logits)

    def _bubble(self, sizes: ParallelSizes, passes: tuple[Pass, ...], head: float) -> float:
        """Return the idle seconds of the ranks of a pipeline, as if all were as fast as their mean."""
        p = sizes.pipeline
        seconds = [(self.shape.num_layers * sum(each.values()) + head) / p for each in passes]
        if sizes.schedule in V_SHAPED:  # their formulas are for equal ones
            seconds = [sum(seconds) / 3] * 3
        return theory.idle(sizes.schedule, p, sizes.microbatches, sizes.chunks, *seconds) or 0.0

    def _messages(self, sizes: ParallelSizes) -> float:
        """Return the seconds of messages between stages that no computation hides.

        These are those of the first microbatch on its way, and of the last one on its way back. With 1F1B and
        the naive schedule a stage waits so each time that it has used up the microbatches that it may hold.
        """
        p, m, t = sizes.pipeline, sizes.microbatches, sizes.tensor
        if p == 1:
            return 0.0
        link = self.machine.link(2, sizes.replicas * t)
        once = 2 * (sizes.num_stages - 1) * (link.alpha + self._stream(sizes) / t * link.beta)
        waits = sizes.schedule in ("naive", "1f1b")
        return once * m / theory.most_held(sizes.schedule, p, m, sizes.chunks, 0) if waits else once

    def _data(self, sizes: ParallelSizes, rank: int, forward: float, backward: float) -> float:
        """Return the seconds of the data axis's collectives that no computation hides.

        All n replicas reduce gradients; those of an expert only the n/e replicas that hold it. Without a
        pipeline one microbatch hides them, layer by layer, and what ZeRO 3 gathers, but for one layer's.
        """
        n, e, m, machine = sizes.replicas, sizes.expert_ranks, sizes.microbatches, self.machine
        own, layers = memory.num_experts_of(self.shape, sizes, rank), num_layers_of(self.shape, sizes, rank)
        # The numbers that are reduced together, the ranks that do so, and how far these are apart.
        dense = memory.num_parameters_of(self.shape, sizes, rank) - own
        parts = [(dense, n, sizes.tensor), (own, n // e, e * sizes.tensor)]
        of_parameter, of_gradient, _ = STATE["float32" if machine.autocast else sizes.precision]
        copying = Link(0.0, COPIED_BYTES / machine.bandwidth / machine.share * (machine.cores is not None))

        def left(ops: list[tuple[str, float]], hiding: float) -> float:
            """Return the seconds of all layers' collectives that `hiding` seconds of work do not hide."""
            comm = copies = 0.0
            for (op, size), (numbers, ranks, stride) in product(ops, parts):
                if numbers:
                    layer = numbers / layers * size
                    comm += layers * self._reduction(op, layer, ranks, stride)
                    copies += layers * collective(op, layer, ranks, copying)
            return copies + (comm if sizes.pipeline > 1 else max(comm - hiding, comm / layers))

        if sizes.zero == 0:
            return left([("all_reduce", of_gradient)], backward)
        scatter, gather = ("reduce_scatter", of_gradient), ("all_gather", of_parameter)
        if sizes.zero == 3:
            return m * (left([gather], forward) + left([gather, scatter], backward))
        return (m if sizes.zero == 2 else 1) * left([scatter], backward) + left([gather], 0.0)
