"""Save a run's checkpoints, continue from one, and end all ranks after the same step when a user asks.

before the first step     --resume, --auto-resume     load the newest checkpoint of the folder
after a step              --checkpoint-every          begin to save; the training continues meanwhile
after the last one        --checkpoint                save, and wait for it
after Ctrl-C, SIGUSR1     --checkpoint                the same after the step in which a rank was asked
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from comm.collectives import all_reduce
from comm.exchange import on_main
from lab.cluster import Cluster
from lab.launch.errors import Complete, Stopped, WorkbookError
from lab.launch.interrupt import StopRequest
from lab.launch.launcher import restart_count
from training.arguments import TrainArgs
from training.checkpoint import Checkpoints, complete_steps
from training.state_shards import StateShard, plain_shards
from training.validate import refuse_if


class Resuming:
    """One rank's side of the checkpoints in the folder of --checkpoint; without the option it does nothing.

    `extra` is kept in each checkpoint; its "made_with" must be the same for another run to go on from there.
    """

    first_step = 0  # 0, or after a resume the number of steps that the checkpoint has

    def __init__(self, cluster: Cluster, args: TrainArgs, extra: dict[str, Any]) -> None:
        self._cluster, self._args, self._extra = cluster, args, extra
        if args.checkpoint is None:
            return
        folder = Path(args.checkpoint)
        steps = on_main(cluster, f"look for checkpoints in {folder}", lambda: complete_steps(folder))
        self._newest = steps[-1] if steps else None
        refuse_if(
            args.resume and not steps,
            f"There is no checkpoint in {folder} to resume from; name the directory of an earlier run, or "
            "leave out --resume.",
        )
        refuse_if(
            steps and not (args.resume or args.auto_resume),
            f"{folder} has the checkpoint of step {self._newest}, from which this run has not started: "
            "resume from it, or name another folder",
        )
        self._checkpoints = Checkpoints(folder, cluster, args.checkpoint_keep)

    @contextmanager
    def begin(self, model: Any, optimizer: Optimizer) -> Iterator[None]:
        """Load the newest checkpoint, if asked to, and note in the block if a user asks to stop."""
        if self._args.checkpoint is None:
            yield
            return
        self._model, self._optimizer = model, optimizer
        if self._newest is not None:
            self.first_step = self._load(self._newest)
        self._say_where_it_begins()
        with StopRequest() as self._stop_request:
            yield

    def save_if_due(self, done: int) -> None:
        """Save after every --checkpoint-every steps, after the last one and after Ctrl-C.

        After Ctrl-C raise Stopped on all ranks: otherwise one would wait in a collective for a rank that has
        left.
        """
        args = self._args
        if args.checkpoint is None:
            return
        is_last, asked = done == args.steps, 0
        if not is_last:
            codes = torch.tensor([self._stop_request.exit_code], dtype=torch.uint8).to(self._cluster.device)
            all_reduce(codes, op="max")
            asked = int(codes)
        if is_last or asked or (args.checkpoint_every and done % args.checkpoint_every == 0):
            self._checkpoints.save(done, self._shards(), self._extra)
        if is_last or asked:
            self._checkpoints.wait()
        if asked:
            sentence = f"stopped after step {done} of {args.steps}; the checkpoint is in {args.checkpoint}: "
            raise Stopped(f"{sentence}--resume continues from there.", asked)

    @contextmanager
    def completed_save(self) -> Iterator[None]:
        """After an error in the block wait for a save that is under way: it is the last good state."""
        try:
            yield
        except WorkbookError:
            with suppress(WorkbookError):
                if self._args.checkpoint is not None:
                    self._checkpoints.join()
            raise

    def _shards(self) -> list[StateShard]:
        """Return what this rank holds: the model says it, or a sharded optimizer, or it is a plain module."""
        model, optimizer = self._model, self._optimizer
        if hasattr(model, "state_shards"):
            return model.state_shards(optimizer)
        if hasattr(optimizer, "state_shards"):
            return optimizer.state_shards(model)
        return plain_shards(getattr(model, "module", model), optimizer)

    def _load(self, step: int) -> int:
        """Load a checkpoint of any script, on any number of ranks, and return its number of steps."""
        args = self._args
        found, here = self._checkpoints.find(step), self._extra["made_with"]
        made_with = found.extra["made_with"]
        if made_with != here:
            raise WorkbookError(
                f"The checkpoint was made with {made_with}, and this run has {here}; give the same "
                "arguments, or another folder."
            )
        if step >= args.steps and args.auto_resume:
            raise Complete(f"{args.checkpoint} has a checkpoint of all {args.steps} steps; nothing is left.")
        if step >= args.steps:
            raise WorkbookError(f"The checkpoint has {step} steps already; ask for more with --steps.")
        self._checkpoints.load(step, self._shards())
        for part in (self._model, self._optimizer):
            if hasattr(part, "gather_parameters"):  # they were loaded in shards
                part.gather_parameters()
        return step

    def _say_where_it_begins(self) -> None:
        """Tell the user, on rank 0, how much of the training is kept; a new run has nothing to tell."""
        folder, steps, restarts = self._args.checkpoint, self._args.steps, restart_count()
        text = f"training starts at step 0 again: {folder} has no complete checkpoint yet."
        if first := self.first_step:
            text = f"training continues after step {first} of {steps}, from the checkpoint in {folder}."
        if self._cluster.is_main and (first or restarts):
            again = f"restart {restarts}: " if restarts else ""
            print(again + text, file=sys.stderr if self._args.json else sys.stdout, flush=True)
