"""Wrong implementations of what all lessons share: data, clipping, evaluation and checkpoints."""

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from exercises.mutants import mutant
from training import checkpoint
from training.checkpoint import Box, Checkpoints, Shard, already_there
from training.data import VALIDATION_BATCHES, TrainingData
from training.run import Run


@mutant(
    target="training.checkpoint.Checkpoints.wait",
    killer="tests.training.test_checkpoint.test_no_rank_goes_on_before_the_checkpoint_is_on_disk",
)
def checkpoint_awaited_by_one_rank(self: Checkpoints) -> None:
    """A rank that reads the checkpoint sometimes finds the one before: only rank 0 waits until it is on
    disk.
    """
    if self._cluster.is_main and self._writer is not None:
        self._writer.join()


@mutant(
    target="training.checkpoint.write",
    killer=(
        "tests.training.test_checkpoint."
        "test_a_checkpoint_becomes_visible_only_when_the_files_of_all_ranks_are_complete"
    ),
    symptom="After a disk was full for a moment, the newest checkpoint lacks the file of a rank.",
)
def checkpoint_complete_before_it_is_written(
    final: Path, token: str, boxes: list[Box], extra: Any, group: dist.ProcessGroup
) -> None:
    """A checkpoint cannot be loaded: its folder had its final name before the files of all ranks were on
    disk.
    """
    final.mkdir(exist_ok=True)
    with checkpoint.in_a_sentence(f"save the checkpoint {final}"):
        writer, planner = checkpoint.Writer(final, final, extra), checkpoint.SavePlanner(boxes)
        dcp.save({}, storage_writer=writer, planner=planner, process_group=group)


@mutant(
    target="training.checkpoint.Checkpoints.save",
    killer=(
        "tests.training.test_checkpoint."
        "test_what_is_written_is_what_there_was_when_the_save_began_and_no_later_change"
    ),
    symptom="A resumed run leaves out some batches, and its losses differ from those of a run in one go.",
)
def checkpoint_of_a_later_batch(
    self: Checkpoints, step: int, shards: Iterable[Shard], extra: Any = None
) -> None:
    """A resumed run leaves out batches: the data position is that of the moment in which the thread wrote
    it.
    """
    if self._not_loaded is not None:
        raise already_there(self._folder, self._not_loaded)
    self.wait()
    if step == self._last_saved:
        return
    copies = self._copied(list(shards))
    self._writer = threading.Thread(target=self._write, args=(step, copies, extra), daemon=True)
    self._writer.start()


@mutant(
    target="training.checkpoint.Checkpoints._copied",
    killer=(
        "tests.training.test_checkpoint."
        "test_what_is_written_is_what_there_was_when_the_save_began_and_no_later_change"
    ),
    symptom="The losses jump after a restart, as if the weights of two steps were mixed.",
)
def checkpoint_of_tensors_that_change(self: Checkpoints, shards: list[Shard]) -> list[Box]:
    """A checkpoint mixes the weights of two steps: a thread reads the tensors that the optimizer changes."""
    return [box for shard in shards for box in shard.boxes(shard.tensor.detach().view(-1))]


@mutant(
    target="training.checkpoint._shared_out",
    killer="tests.training.test_checkpoint.test_what_only_some_ranks_hold_is_saved_by_one_of_them",
    symptom="A run with divided experts saves checkpoints without an error, and no run can resume from one.",
)
def checkpoint_of_what_the_rank_does_not_hold(layouts: list[list[tuple[Any, ...]]]) -> list[set]:
    """A checkpoint lacks experts: replicas take turns in saving tensors, and hold different experts."""
    mine: list[set] = [set() for _ in layouts]
    for number in range(max(map(len, layouts))):
        rank = number % len(layouts)
        mine[rank] |= set(layouts[rank][number : number + 1])
    return mine


@mutant(
    target="training.checkpoint.shards_of",
    killer="tests.training.test_checkpoint.test_the_state_of_an_optimizer_lies_where_its_parameter_does",
    fails_with="invalid fill",
)
def checkpoint_state_of_the_first_shard(
    name, trained, optimizer, shape=None, offset=None, box=None, start=0, is_copy=False
) -> Iterator[Shard]:
    """After a resume the loss jumps: each rank's optimizer state was saved as that of a parameter's first
    shard.
    """
    yield Shard(f"model/{name}", trained, shape, offset, box, start, is_copy)
    for kind, value in optimizer.state.get(trained, {}).items():
        yield Shard(f"optimizer/{kind}/{name}", value, shape if value.dim() else None)


@mutant(
    target="training.run.Run._load",
    killer=(
        "tests.hybrid_parallel.test_resume.test_a_resumed_run_on_another_mesh_goes_on_where_the_first_one_was"
    ),
)
def resumes_with_the_first_batches(self: Run, step: int) -> int:
    """A resumed run has another loss than an undisturbed one: it trains on the first batches again."""
    _, optimizer = self._trained
    self._checkpoints.create_state(step, optimizer)
    self._checkpoints.load(step, self._shards())
    for part in self._trained:
        if hasattr(part, "gather_parameters"):
            part.gather_parameters()
    return 0


@mutant(
    target="training.evaluation.evaluating",
    killer="tests.pipeline_parallel.test_mutant_killers.test_training_goes_on_with_dropout_after_an_evaluation",
)
@contextmanager
def pipeline_evaluation_mode_stays(model: nn.Module) -> Iterator[None]:
    """After the first evaluation training continues without dropout, and the model overfits."""
    model.eval()
    with torch.no_grad():
        yield


@mutant(
    target="training.data.seed_step",
    killer="tests.training.test_randomness.test_ranks_with_examples_of_their_own_draw_different_masks",
    cause="the same again",
)
def ranks_drop_out_the_same(seed: int, step: int, stream: int) -> None:
    """Dropout regularises less on more ranks: all have the same seed, so their examples share one mask."""
    torch.manual_seed(seed * 1_000_003 + step)


@mutant(
    target="training.evaluation.held_out_means",
    killer="tests.training.test_evaluation.test_all_ranks_report_the_means_over_the_examples_of_all_ranks",
)
def validated_on_one_ranks_slice(
    batches, sums, tokens: int, device: torch.device, pattern: str
) -> tuple[float, float]:
    """The validation loss depends on the number of ranks: rank 0 reports the mean over its own slice only."""
    total, counted = torch.zeros(2, dtype=torch.float64, device=device), 0
    for x, y, counts in batches:
        mine = sums(x, y, counts)
        if mine is not None:
            total += mine
            counted += int(counts.sum()) * y.shape[1:].numel()
    loss, right = (total / max(counted, 1)).tolist()
    return loss, right


@mutant(
    target="training.data.TrainingData.held_out",
    killer="tests.training.test_evaluation.test_what_is_validated_is_not_trained_on_and_not_dropped_out",
)
def validated_on_what_was_trained_on(self: TrainingData) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """The validation loss falls as the training loss does, however much the model overfits."""
    for step in range(VALIDATION_BATCHES):
        x, y = self.batch(step)
        yield x, y, y[:, 0] >= 0
