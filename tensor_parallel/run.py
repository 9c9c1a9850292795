"""Run the scripts of this folder: all ranks get the same batch, and checkpoints hold full tensors."""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

import training.arguments
import training.run
from comm.chosen_pattern import use_pattern
from comm.functions import InFlightAllGather
from lab.cluster import Cluster
from lab.models.model import GPTConfig
from lab.trace.ledger import LEDGER
from lab.trace.memory import saved_activations
from tensor_parallel.arguments import validate_size
from tensor_parallel.parallel_model import TensorParallel
from training.arguments import ClipArgs, NotOffered, Size
from training.evaluation import Sums
from training.full_state_checkpoint import FullState


@dataclasses.dataclass
class Args(ClipArgs, training.arguments.Args):
    """Train a small GPT on the source of Python's standard library, its layers divided among the ranks."""

    size: Size = "24heads"
    """Size of the GPT (lab/models/model.py). The number of ranks must divide its number of heads: tiny and
    small have 4, 8layers and 13m have 8, 24heads has 24."""
    overlap: bool = True
    """Hide the reductions in the backward (overlapped.py); --no-overlap runs what layers.py shows."""
    metronome: NotOffered = None  # it runs no layer, so there is nothing to divide


def activations_formula(config: GPTConfig, batch: int, n: int, sequence_parallel: bool) -> float:
    """Return a forward's bytes by Korthikanti et al. 2022, equations 2 and 4, for 16 bit, with dropout.

    s b h (10 + 24/n + 5 a s / (h n)) for each layer of s tokens, b examples, width h and a heads on n ranks;
    with sequence parallelism the 10 is divided by n, too.
    """
    s, h, a = config.block_size, config.width, config.num_heads
    outside = 10 / n if sequence_parallel else 10
    return config.num_layers * batch * s * h * (outside + 24 / n + 5 * a * s / (h * n))


class Run(training.run.Run):
    """One rank's side of a tensor parallel run: all ranks train on the same examples."""

    def __init__(self, cluster: Cluster, args: Args, run_mode: str) -> None:
        super().__init__(cluster, args, run_mode, whole_batch=True)
        use_pattern(args.pattern)
        self._activations: int | None = None
        self._block_bytes = self._block_formula = 0

    def _validate(self, args: training.arguments.TrainArgs) -> None:
        validate_size(args.size, self._cluster.world_size)  # first: then there is no trace of a refused run
        super()._validate(args)

    @contextlib.contextmanager
    def observed(self, model: TensorParallel, x: Tensor) -> Iterator[None]:
        """Count, around the first forward, what autograd keeps and what the first block sends.

        The block's traffic is that of its forward and backward. Later forwards are not observed.
        """
        if self._activations is not None:
            yield
            return
        block, self._block_formula = model.module.blocks[0], model.traffic_per_block(*x.shape).bytes_sent
        hooks = [
            block.register_forward_pre_hook(lambda *_: self._count(-1)),
            block.register_forward_hook(lambda *_: self._count(1)),
            block.register_full_backward_pre_hook(lambda *_: self._count(-1)),
        ]
        # The last one is called when the block's backward is over. Then all of them are removed.
        hooks.append(block.register_full_backward_hook(lambda *_: self._count(1, hooks)))
        with saved_activations(model.parameters) as saved:
            yield
        self._activations = saved.bytes

    def _count(self, sign: int, hooks: Sequence[RemovableHandle] = ()) -> None:
        self._block_bytes += sign * LEDGER.total().bytes_sent
        for hook in hooks:
            hook.remove()

    def finish(self, model: nn.Module, **extras: Any) -> dict[str, Any]:
        """Finish as training.run does, with the full model put together; all ranks must call it."""
        assert isinstance(model, TensorParallel)
        whole = self.model()
        whole.load_state_dict(model.full_state_dict())
        return super().finish(
            whole,
            block_bytes=self._block_bytes,
            block_bytes_formula=self._block_formula,
            activations_bytes=self._activations,
            activations_formula_bytes=activations_formula(
                self._config, self._args.batch_size, self._cluster.world_size, model.sequence_parallel
            ),
            **extras,
        )

    def sums(self, model: nn.Module, x: Tensor, y: Tensor, counts: Tensor) -> Sums | None:
        """Return on rank 0 the sum of losses, which all ranks compute from their shards of the logits."""
        assert isinstance(model, TensorParallel)
        loss = model.loss(model(x), y).double() * y.numel()
        return torch.stack([loss, torch.zeros_like(loss)]) if self._cluster.is_main else None

    def state(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> FullState:
        """Return the state as one process has it; any number of ranks can divide it again."""
        assert isinstance(model, TensorParallel)
        names = [name for name, _ in model.module.named_parameters()]

        def get() -> dict[str, Any]:
            shards = optimizer.state_dict()
            full = shards | {"state": self._full(model, names, shards["state"])}
            return {"model": model.full_state_dict(), "optimizer": full}

        def put(state: dict[str, Any]) -> None:
            model.load_full_state_dict(state["model"])
            shards = {
                i: {
                    key: model.shard_of(names[i], value) if value.dim() else value
                    for key, value in one.items()
                }
                for i, one in state["optimizer"]["state"].items()
            }
            optimizer.load_state_dict(state["optimizer"] | {"state": shards})

        return FullState(get, put)

    @staticmethod
    def _full(
        model: TensorParallel, names: list[str], state: dict[int, dict[str, Any]]
    ) -> dict[int, dict[str, Any]]:
        """Return the optimizer's state as one process has it. All ranks must call it."""
        result: dict[int, dict[str, Any]] = {}
        for i, one in state.items():
            result[i] = dict(one)
            if names[i] in model.dims:
                dim, size = model.dims[names[i]]
                for key, value in one.items():
                    if value.dim():
                        full = InFlightAllGather(value, dim, model.group).wait()
                        result[i][key] = full.narrow(dim, 0, size).contiguous()
        return result

    def _made_with(self) -> dict[str, Any]:
        """Let any number of ranks go on, with or without sequence parallelism."""
        return super()._made_with() | {"run_mode": "tensor_parallel"}
