"""Run the scripts of this folder: arguments, checkpoints that hold all experts, and the report."""

import dataclasses
import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

import training.arguments
import training.run
from comm.collectives import use_pattern
from expert_parallel.config import MoEConfig, validate
from expert_parallel.expected_traffic import tokens_between
from expert_parallel.full_state import (
    FullModel,
    full_optimizer_state,
    full_state,
    load_optimizer_state,
    own_state,
)
from expert_parallel.groups import form_groups
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from training.arguments import NotOffered, TrainArgs
from training.full_state_checkpoint import FullState


@dataclasses.dataclass
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


class Run(training.run.Run):
    """One rank's side of an expert parallel run: each rank has its slice of the batch, and some experts."""

    def __init__(self, cluster: Cluster, args: Args, run_mode: str) -> None:
        self.moe = MoEConfig(args.experts, args.top_k, args.capacity, args.shared)
        self._expert_ranks, self._balance = args.expert_ranks, args.balance
        if self._expert_ranks is None:
            self._expert_ranks = math.gcd(cluster.world_size, args.experts)
        super().__init__(cluster, args, run_mode)
        self.groups = form_groups(self._expert_ranks)
        for group in (self.groups.everyone, self.groups.experts, self.groups.replicas):
            use_pattern(args.pattern, group)

    def _validate(self, args: TrainArgs) -> None:
        assert isinstance(args, Args)
        validate(self.moe, self._expert_ranks, self._cluster.world_size)
        for option, number in (("--aux-weight", args.aux_weight), ("--bias-rate", args.bias_rate)):
            if not 0 <= number < float("inf"):
                raise WorkbookError(f"{option} {number:g}: it is a number from 0, such as 0.01.")
        super()._validate(args)

    def finish(self, model: nn.Module, **extras: Any) -> dict[str, Any]:
        """Finish as training.run does, with the experts of all ranks put together; all ranks must call it."""
        full = FullModel(full_state(model.module.state_dict(), self.groups))
        return super().finish(full, **self._of_the_last_step(model), **extras)

    def _of_the_last_step(self, model: nn.Module) -> dict[str, Any]:
        """Return what the router has decided: of all ranks, but the bytes are this rank's payload."""
        chosen_bE = torch.stack([layer.chosen_rE.sum(0) for layer in model.layers])
        sent_bE = torch.stack([layer.sent_rE.sum(0) for layer in model.layers])
        imbalance = chosen_bE.max(1).values / chosen_bE.double().mean(1)
        row_bytes = model.module.config.width * model.dense[0].element_size()
        tokens = sum(self._tokens_away(layer.sent_rE) for layer in model.layers)
        return {
            "least_balanced_block": int(imbalance.argmax()),
            "tokens_per_expert": chosen_bE[imbalance.argmax()].tolist(),
            "imbalance": round(float(imbalance.max()), 3),
            "dropped_tokens": int((chosen_bE - sent_bE).sum()),
            "dispatch_bytes": 2 * tokens * row_bytes,
        }

    def _tokens_away(self, sent_rE: Tensor) -> int:
        """Return how many tokens this rank sends to other ranks, and gets from them to send back."""
        between, rank = tokens_between(sent_rE, self.groups), self.groups.rank
        return int(between[rank].sum() + between[:, rank].sum() - 2 * between[rank, rank])

    def state(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> FullState:
        """Return the state as one process has it; any number of ranks can divide it again."""

        def get() -> dict[str, Any]:
            return {
                "model": full_state(model.module.state_dict(), self.groups),
                "optimizer": full_optimizer_state(model.module, optimizer, self.groups),
            }

        def put(state: dict[str, Any]) -> None:
            model.module.load_state_dict(own_state(state["model"], model.module.state_dict()))
            load_optimizer_state(model.module, optimizer, state["optimizer"])

        return FullState(get, put)

    def _made_with(self) -> dict[str, Any]:
        """Let any number of ranks go on. With a capacity, other tokens are then dropped."""
        return super()._made_with() | dataclasses.asdict(self.moe) | {"balance": self._balance}
