"""Validate the arguments of a run: what makes no sense is refused in a sentence before the first step."""

import math
import tempfile
from contextlib import ExitStack
from pathlib import Path

import torch.distributed as dist

from comm.exchange import on_all, on_main
from lab import units
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from training.arguments import TrainArgs

MAX_BUCKET_MB = 1 << 20  # a TiB
MAX_BATCH = 1 << 20  # examples; thousands of GiB of activations, even in the smallest model
MAX_STEPS = 10**9  # years
SEEDS = 1 << 32


def validate_arguments(args: TrainArgs, sharing: int, model: str) -> None:
    """Refuse arguments that make no sense together; `sharing` ranks share a batch."""
    validate_numbers(args.steps, args.batch_size, args.lr, args.seed)
    validate_folder_name("--checkpoint", args.checkpoint)
    validate_folder_name("--trace", args.trace)
    if (args.resume or args.auto_resume) and args.checkpoint is None:
        option = "--resume" if args.resume else "--auto-resume"
        raise WorkbookError(f"{option} needs to know from where: name the folder with --checkpoint.")
    if args.resume and args.auto_resume:
        raise WorkbookError(
            "--resume refuses a folder without a checkpoint, and --auto-resume starts at step 0 there: "
            "give one of them."
        )
    validate_shares(args.batch_size, sharing)
    mine, parts = args.batch_size // sharing, getattr(args, "grad_acc_steps", 1)
    if parts < 1:
        raise WorkbookError(f"--grad-acc-steps {parts}: there must be at least one.")
    if mine % parts:
        fits = sharing * parts
        raise WorkbookError(
            f"--grad-acc-steps {parts} must divide the {mine} examples that a rank has in a step; "
            f"take a multiple of {fits} for --batch-size, such as {-(-args.batch_size // fits) * fits}."
        )
    bucket_mb = getattr(args, "bucket_mb", None)
    if bucket_mb is not None:
        validate_bucket(bucket_mb)
    if args.eval_every < 0:
        raise WorkbookError(
            f"--eval-every {args.eval_every}: it is a number of steps, or 0 for the end only."
        )
    clip = getattr(args, "clip", None)
    if clip is not None and not clip > 0:
        raise WorkbookError(f"--clip {clip:g}: the largest norm is a number above 0.")
    if args.transport != "auto" and dist.get_backend() == "nccl":
        raise WorkbookError(
            f"--transport {args.transport}: nccl has its own; leave it out or take BACKEND=gloo."
        )
    if args.metronome is not None and model != "gpt":
        raise WorkbookError("--metronome works with the GPT only; leave --model out.")


def validate_nccl(cluster: Cluster, what: str) -> None:
    """Refuse a technique of PyTorch's own on GPUs with gloo; `what` is its name.

    It hands tensors of GPUs to the backend itself. gloo reads them as host memory, and the process dies.
    """
    if cluster.device.type == "cuda" and dist.get_backend() != "nccl":
        raise WorkbookError(
            f"{what} sends tensors of GPUs by itself, which only nccl can; leave BACKEND out and give each "
            "rank a GPU of its own, or train on the CPU with CUDA_VISIBLE_DEVICES= in front of the command."
        )


def validate_numbers(steps: int, batch_size: int, lr: float, seed: int) -> None:
    """Refuse what no run can train with."""
    if steps < 1:
        raise WorkbookError(f"--steps {steps}: there must be at least one.")
    if steps > MAX_STEPS:
        raise WorkbookError(f"--steps {steps}: there can be at most {MAX_STEPS}.")
    if batch_size < 1:
        raise WorkbookError(f"--batch-size {batch_size}: there must be at least one example.")
    if batch_size > MAX_BATCH:
        raise WorkbookError(f"--batch-size {batch_size}: there can be at most {MAX_BATCH} examples.")
    if not 0 < lr < math.inf:
        raise WorkbookError(f"--lr {lr:g}: a learning rate is a number above 0, such as 0.001.")
    if not 0 <= seed < SEEDS:
        raise WorkbookError(f"--seed {seed}: a seed is a whole number from 0 to {SEEDS - 1}.")


def validate_shares(batch_size: int, ranks: int) -> None:
    """Refuse a batch of which the ranks would not have equal shares."""
    if batch_size % ranks:
        more = (batch_size // ranks + 1) * ranks
        raise WorkbookError(
            f"--batch-size {batch_size}: {ranks} ranks cannot share it equally; choose a multiple of "
            f"{ranks}, such as --batch-size {more}."
        )


def validate_bucket(megabytes: float) -> None:
    """Refuse a cap that is not above 0, or is larger than a TiB."""
    if not 0 < megabytes <= MAX_BUCKET_MB:
        raise WorkbookError(
            f"--bucket-mb {megabytes:g}: a bucket's cap is a number of MiB above 0, such as 4, "
            f"and at most {MAX_BUCKET_MB}."
        )


def tick_seconds(metronome: str) -> float:
    """Return the seconds of `--metronome`."""
    try:
        return units.seconds(metronome)
    except WorkbookError as error:
        raise WorkbookError(f"--metronome {metronome}: {error}.") from error


def validate_folder_name(option: str, name: str | None) -> None:
    """Refuse an empty name, which would mean the current folder."""
    if name is not None and not name.strip():
        raise WorkbookError(f"{option} has no value: name a folder.")


def validate_folder(cluster: Cluster, option: str, name: str, resume: bool = False) -> None:
    """Refuse, on all ranks, a folder in which rank 0 cannot write. Create it, except to resume from it."""
    folder = Path(name)

    def make() -> None:
        if resume and not folder.is_dir():
            raise nothing_in(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _cannot_write(option, folder, 0, error) from error
        _try_to_write(option, folder, 0)

    on_main(cluster, option, make)


def validate_shared_folder(cluster: Cluster, option: str, name: str, resume: bool = False) -> None:
    """Refuse, on all ranks, a folder that is not the same for all, or in which one of them cannot write."""
    validate_folder(cluster, option, name, resume)
    folder = Path(name)
    with ExitStack() as until_seen:

        def mark() -> str:
            return Path(until_seen.enter_context(tempfile.NamedTemporaryFile(dir=folder)).name).name

        made = on_main(cluster, option, mark)

        def look() -> None:
            if not (folder / made).exists():
                raise WorkbookError(
                    f"{option} {folder}: rank {cluster.rank} does not see what rank 0 writes there; "
                    "name a folder that all machines share."
                )
            _try_to_write(option, folder, cluster.rank)

        on_all(option, look)


def _try_to_write(option: str, folder: Path, rank: int) -> None:
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            file.write(b"a full disk takes a file, but nothing in it")
    except OSError as error:
        raise _cannot_write(option, folder, rank, error) from error


def _cannot_write(option: str, folder: Path, rank: int, error: OSError) -> WorkbookError:
    why = error.strerror or error
    return WorkbookError(f"{option} {folder}: rank {rank} cannot write there ({why}); name another folder.")


def nothing_in(folder: Path) -> WorkbookError:
    """Return the error for a folder without a checkpoint."""
    return WorkbookError(
        f"There is no checkpoint in {folder} to resume from; name the directory of an earlier run, "
        "or leave out --resume."
    )
