"""Expert parallelism: a token passes only a few of many experts, and the experts lie on different ranks.

      rank 0   tokens ─► router ─► in order of expert ─┐          ┌─► experts 0 1 ─┐         ┌─► weighted sum
                                                       ├ dispatch ┤                ├ combine ┤
      rank 1   tokens ─► router ─► in order of expert ─┘          └─► experts 2 3 ─┘         └─► weighted sum

The MLP of a block becomes E experts, which are MLPs of the same size, and a router that sends each token to k
of them. So the MLPs have E times the parameters, and a token costs k times the multiplications. Every rank
has its slice of the batch and a copy of everything but the experts, as in data parallelism. Dispatch is an
all-to-all in which a rank sends every other rank the tokens for its experts, and combine is the same in
reverse. In the backward the gradients go the same ways back. If the n ranks hold one copy of each of the E
experts, and a rank has t tokens of d numbers:

      sent by a rank for a layer    4 (n-1)/n t k d numbers, if all experts are chosen equally
      data parallel would send      2 (n-1)/n E 8 d^2 numbers: the gradients of all experts (comm/cost.py)

So expert parallelism sends less if t k < 4 E d, and a rank keeps an n-th of the experts. How many tokens an
expert gets is not known in advance, and the slowest rank sets the time of all. So experts are balanced
(balancing.py), and `--capacity` drops assignments that are too many for one expert: their token keeps its
other experts, and one without any gets the output of the shared expert only (`--shared`), or nothing.

The gradients of other parameters are means over all ranks. An expert's gradient is a sum over the tokens of
its expert group, so it is divided by the number of ranks of the group. Replicas of an expert (config.py) saw
other tokens, so they take the mean of theirs.

The parts of the technique: config.py has the sizes and says which ranks share experts, balancing.py keeps all
experts busy, traffic.py has the formulas, and full_state.py puts the experts of all ranks together.

After Shazeer et al., "Outrageously Large Neural Networks", 2017, https://arxiv.org/abs/1701.06538 (experts
and router); Lepikhin et al., "GShard", 2020, https://arxiv.org/abs/2006.16668 (dispatch and capacity); Fedus,
Zoph and Shazeer, "Switch Transformers", 2021, https://arxiv.org/abs/2101.03961 (weights and auxiliary loss);
DeepSeek-AI, "DeepSeek-V3", 2024, https://arxiv.org/abs/2412.19437 (bias and shared expert).

Shapes by suffix: t this rank's tokens, d width, k chosen experts of a token, E experts, L experts of a rank,
a assignments of a token to an expert (t * k of them, without those that are dropped), r ranks.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

import training.arguments
from comm.collectives import Group, all_gather, broadcast
from comm.functions import exchange_shards
from comm.in_flight import InFlightExchange
from comm.script import start
from expert_parallel.balancing import auxiliary_loss, move_bias
from expert_parallel.config import (
    ExpertGroups,
    MoEConfig,
    form_groups,
    make_expert,
    random_numbers_of,
    validate_experts,
)
from expert_parallel.full_state import full_state
from expert_parallel.traffic import layer_traffic, router_figures
from lab.autograd import is_in_backward
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.models.model import GPT, GPTConfig, loss_of
from lab.trace.ledger import Traffic
from training.arguments import NotOffered
from training.gradients import average_gradients, average_traffic
from training.guard import guarded
from training.model_on_rank import ModelOnRank
from training.run import Run


class Router(nn.Module):
    """Choose top_k experts for each token. The weight of a chosen expert is its probability.

    The weights of a token are not divided by their sum: with k = 1 the weight would always be 1, and the
    router would get no gradient. The bias decides who is chosen (balancing.py), and not the weight.
    """

    bias_E: Tensor

    def __init__(self, width: int, num_experts: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.weight = nn.Parameter(torch.randn(num_experts, width) * 0.02)
        self.register_buffer("bias_E", torch.zeros(num_experts))

    def _apply(self, *function: Any, **options: Any) -> Self:
        """Cast and move the module, but not the bias to 16 bits, in which its small steps would be lost."""
        before = self.bias_E
        super()._apply(*function, **options)
        if self.bias_E.itemsize < before.itemsize:
            self.bias_E = before.to(self.bias_E.device)
        return self

    def forward(self, x_td: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the probabilities of all experts, the weights of the chosen ones, and their numbers."""
        probabilities_tE = (x_td @ self.weight.T).softmax(-1)
        experts_tk = (probabilities_tE.detach() + self.bias_E).topk(self.top_k).indices
        return probabilities_tE, probabilities_tE.gather(1, experts_tk), experts_tk


class MixtureOfExperts(nn.Module):
    """Send each token to its experts, and return the weighted sum of what these make of it.

    `chosen_rE` counts for each rank how many of its tokens have chosen each expert, in the last forward in
    training mode, and `sent_rE` how many it has sent there. The others were dropped. `counts_rE` adds up
    the choices of all these forwards since the bias was moved.
    """

    counts_rE: Tensor | None = None

    def __init__(
        self, config: GPTConfig, moe: MoEConfig, groups: ExpertGroups, seed: int, layer: int
    ) -> None:
        super().__init__()
        self.moe, self.groups = moe, groups
        self.own_experts = groups.own_experts(moe.num_experts)
        with random_numbers_of(seed, layer, "router"):
            self.router = Router(config.width, moe.num_experts, moe.top_k)
        self.experts = nn.ModuleDict({str(e): make_expert(config, seed, layer, e) for e in self.own_experts})
        self.shared = make_expert(config, seed, layer, "shared") if moe.shared else None

    def forward(self, x_btd: Tensor) -> Tensor:
        x_td = x_btd.flatten(0, -2)
        if torch.is_grad_enabled() and not x_td.requires_grad:
            # Frozen embeddings, or the layer alone: this rank must still join the backward's all-to-alls.
            x_td = x_td.detach().requires_grad_()
        probabilities_tE, weights_tk, experts_tk = self.router(x_td)
        chosen_rE, sent_rE = self.count(experts_tk)
        if self.training:
            if not is_in_backward():  # which computes a forward again
                self.counts_rE = chosen_rE if self.counts_rE is None else self.counts_rE + chosen_rE
            self.chosen_rE, self.sent_rE = chosen_rE, sent_rE
            self.auxiliary_loss = auxiliary_loss(probabilities_tE, chosen_rE)

        place = self.groups.place
        assignments = self.in_order_of_expert(experts_tk, chosen_rE[place], sent_rE[place])
        in_group_rE = sent_rE[self.groups.members]
        arriving_rL = in_group_rE[:, self.own_experts.start : self.own_experts.stop].tolist()
        received = [sum(row) for row in arriving_rL]  # tokens from each rank of the expert group
        sent = sent_rE[place].view(len(in_group_rE), -1).sum(1).tolist()  # tokens to each

        x_ad = x_td[assignments // self.moe.top_k]
        dispatched = InFlightExchange(x_ad, sent=sent, received=received, group=self.groups.experts)
        y_td = torch.zeros_like(x_td) if self.shared is None else self.shared(x_td)  # while tokens travel
        outputs = self.compute(dispatched.wait(), arriving_rL)
        y_ad = exchange_shards(outputs, dim=0, group=self.groups.experts, sent=received, received=sent)
        return self.combine(y_td, y_ad, weights_tk, assignments).view_as(x_btd)

    def count(self, experts_tk: Tensor) -> tuple[Tensor, Tensor]:
        """Return how many tokens of each rank have chosen each expert, and how many of them are sent to it.

        An all-gather of E numbers tells a rank how many tokens it will get, and all ranks the global counts.
        They are copied to host memory once: the sizes of the messages depend on them.
        """
        choices = experts_tk.flatten()
        chosen_E = choices.new_zeros(self.moe.num_experts).scatter_add_(0, choices, torch.ones_like(choices))
        everyone = self.groups.everyone
        chosen = chosen_E.new_empty(dist.get_world_size(everyone) * len(chosen_E))
        all_gather(chosen, chosen_E, everyone)
        chosen_rE = chosen.cpu().view(-1, len(chosen_E))
        if self.moe.capacity is None:
            return chosen_rE, chosen_rE
        # A row of chosen_rE adds up to that rank's tokens times k.
        capacity_r = (self.moe.capacity * chosen_rE.sum(1).double() / len(chosen_E)).ceil().long()
        return chosen_rE, chosen_rE.minimum(capacity_r.unsqueeze(1))

    def in_order_of_expert(self, experts_tk: Tensor, chosen_E: Tensor, sent_E: Tensor) -> Tensor:
        """Return the assignments that are sent, as numbers: i is of token i // k and its choice number i % k.

        They are in the order of experts, and for each expert in that of tokens. The capacity drops the last.
        """
        by_expert = experts_tk.flatten().argsort(stable=True).split(chosen_E.tolist())
        return torch.cat([mine[:n] for mine, n in zip(by_expert, sent_E.tolist(), strict=True)])

    def compute(self, arrived: Tensor, arriving_rL: list[list[int]]) -> Tensor:
        """Return what this rank's experts make of the tokens, in the order in which these have arrived.

        They come from one rank after the other, and from each in the order of experts: an expert has one part
        from each rank. It computes in any case: without tokens its gradient is zero.
        """
        num_own = len(self.experts)
        parts = list(arrived.split([n for row in arriving_rL for n in row]))
        for number, expert in enumerate(self.experts.values()):
            own = parts[number::num_own]
            parts[number::num_own] = expert(torch.cat(own)).split([len(part) for part in own])
        return torch.cat(parts)

    def combine(self, y_td: Tensor, y_ad: Tensor, weights_tk: Tensor, assignments: Tensor) -> Tensor:
        """Add to each token of `y_td` what its experts have made of it, times their weights.

        A dropped token gets nothing more: the block adds `y_td` to its residual.
        """
        weights_a = weights_tk.flatten()[assignments]
        terms_ad = (y_ad * weights_a.unsqueeze(1)).to(y_td.dtype)
        # Each term has a place of its own: GPUs would add up several in one place in any order.
        places = y_td.new_zeros(weights_tk.numel(), y_td.shape[1]).index_copy(0, assignments, terms_ad)
        return y_td + places.view(*weights_tk.shape, -1).sum(1)


@guarded  # refuses what would train wrongly (training/guard.py); without it the class does the same
class ExpertParallel(ModelOnRank):
    """A GPT with experts in place of its MLPs. Each rank of `groups.everyone` has its slice of the batch.

    Call `finish_gradient_sync()` once, after the last backward: then every `param.grad` is that of one
    process with the global batch (with a capacity, of one that drops the same assignments). Every trained
    parameter gets a gradient, which is zero for an expert without tokens. A penalty on weights belongs in
    the optimizer (weight_decay): in the loss it would reach experts n times too weak, with n ranks in an
    expert group.
    """

    may_freeze_later = True  # `average_gradients` takes the parameters that are trained in this step

    def __init__(self, module: GPT, moe: MoEConfig, groups: ExpertGroups, seed: int = 0) -> None:
        super().__init__(module)
        self.groups = groups
        for number, block in enumerate(module.blocks):
            layer = MixtureOfExperts(module.config, moe, groups, seed, number)
            block.mlp = layer.to(module.token_embedding.weight)
        self.layers = [block.mlp for block in module.blocks]
        self.experts = [p for layer in self.layers for p in layer.experts.parameters()]
        own = set(self.experts)
        self.dense = [parameter for parameter in module.parameters() if parameter not in own]
        # Experts are drawn from seed, layer and number, so replicas of an expert are equal already.
        for tensor in [*self.dense, *module.buffers()]:
            broadcast(tensor.data, root=0, group=groups.everyone)

    def auxiliary_loss(self) -> Tensor:
        """Return the sum over layers of the balancing loss of the last forward."""
        total = torch.stack([layer.auxiliary_loss for layer in self.layers]).sum()
        if torch.is_grad_enabled() and self.layers[0].router.weight.requires_grad and not total.requires_grad:
            raise WorkbookError("The auxiliary loss has no gradient: checkpoints need use_reentrant=False.")
        return total

    def move_biases(self, rate: float) -> None:
        """Move each router's bias by the counts of all forwards of the step, the same on all ranks."""
        for layer in self.layers:
            if layer.counts_rE is not None:
                move_bias(layer.router.bias_E, layer.counts_rE, rate)
            layer.counts_rE = None

    def finish_gradient_sync(self) -> None:
        """Average gradients over all ranks, and those of an expert over its replicas."""
        average_gradients(self.dense, self.groups.everyone)
        average_gradients(self.experts, self.groups.replicas)
        for parameter in self.experts:
            if parameter.requires_grad:
                parameter.grad /= self.groups.num_expert_ranks  # it was a sum over the tokens of these ranks

    @property
    def norm_groups(self) -> list[Group]:
        return [self.groups.experts]

    def counted_elsewhere(self) -> set[nn.Parameter]:
        return set(self.dense) if self.groups.rank > 0 else set()

    def full_state_dict(self, state: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        return full_state(self.module.state_dict() if state is None else state, self.groups)

    def load_full_state_dict(self, state: dict[str, Tensor]) -> None:
        self.module.load_state_dict({name: state[name] for name in self.module.state_dict()})

    def traffic(self) -> Traffic:
        """Return what this rank sends in a step such as the last one, in which routers chose the experts."""
        width, itemsize = self.module.config.width, self.dense[0].itemsize
        layers = [layer_traffic(layer.sent_rE, width, itemsize, self.groups) for layer in self.layers]
        dense = average_traffic(self.dense, self.groups.everyone)
        return sum(layers, dense + average_traffic(self.experts, self.groups.replicas))


@dataclass
class Args(training.arguments.Args):
    """Train a small GPT with a mixture of experts in each block, the experts divided among the ranks."""

    experts: int = 8
    """Number of experts in each block."""
    top_k: int = 2
    """Number of experts that each token passes."""
    expert_ranks: int | None = None
    """Number of ranks among which the experts are divided. With fewer than all, each expert has replicas.
    None: as many as divide both the ranks and the experts."""
    capacity: float | None = None
    """Let a rank send an expert at most this number times the mean, its tokens * top_k / experts, and drop
    the others. None: no token is dropped."""
    balance: Literal["aux", "bias", "none"] = "aux"
    """How all experts are kept busy (balancing.py). aux: by a term of the loss. bias: by a bias of the
    router's choice."""
    aux_weight: float = 0.01
    """Number by which --balance aux multiplies the term of the loss that it adds, summed over blocks."""
    bias_rate: float = 0.001
    """Number by which --balance bias moves each bias after a step."""
    shared: bool = False
    """Let all tokens pass one more expert, which every rank holds and computes while tokens travel."""
    metronome: NotOffered = None  # it runs no layer, so there is nothing to dispatch

    def validate(self, world_size: int) -> None:
        """Raise WorkbookError unless experts can be divided, and tokens dispatched, as asked."""
        validate_experts(self.moe, self.expert_ranks_of(world_size), world_size)
        for option, number in (("--aux-weight", self.aux_weight), ("--bias-rate", self.bias_rate)):
            if not 0 <= number < math.inf:
                raise WorkbookError(f"{option} {number:g}: it is a number from 0, such as 0.01.")

    @property
    def moe(self) -> MoEConfig:
        return MoEConfig(self.experts, self.top_k, self.capacity, self.shared)

    def expert_ranks_of(self, world_size: int) -> int:
        """Return among how many ranks the experts are divided."""
        return math.gcd(world_size, self.experts) if self.expert_ranks is None else self.expert_ranks

    def made_with(self) -> dict[str, Any]:
        """Return what another run must have, too, to go on from this one's checkpoint."""
        names = ("experts", "top_k", "capacity", "aux_weight", "balance", "shared")
        return super().made_with() | (self.chosen(*names) if self.experts > 1 else {})


def main(cluster: Cluster, args: Args) -> None:
    run = Run(cluster, args, "expert_parallel")
    groups = form_groups(args.expert_ranks_of(cluster.world_size), args.pattern)
    model = ExpertParallel(run.model(), args.moe, groups, args.seed)
    optimizer = run.optimizer(model)
    for x, y in run.batches(model, optimizer):
        optimizer.zero_grad()
        loss = loss_of(model(x), y, run.num_targets)
        penalty = args.aux_weight * model.auxiliary_loss() if args.balance == "aux" else 0.0
        (loss + penalty).backward()
        model.finish_gradient_sync()
        optimizer.step()
        if args.balance == "bias":
            model.move_biases(args.bias_rate)
        run.record(loss, traffic=model.traffic())
    run.finish(model, **router_figures(model))


if __name__ == "__main__":
    start(main, Args)
