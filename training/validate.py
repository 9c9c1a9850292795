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

MAX_BATCH = 1 << 20  # examples; thousands of GiB of activations, even in the smallest model
SEEDS = 1 << 32


def refuse_if(is_wrong: object, sentence: str) -> None:
    """Raise WorkbookError with `sentence` if something is wrong."""
    if is_wrong:
        raise WorkbookError(sentence)


def validate_arguments(args: TrainArgs, sharing: int) -> None:
    """Refuse arguments that make no sense together; `sharing` ranks share a batch."""
    validate_numbers(args.steps, args.batch_size, args.lr, args.seed, sharing)
    for option, name in (("--checkpoint", args.checkpoint), ("--trace", args.trace)):
        refuse_if(name is not None and not name.strip(), f"{option} has no value: name a folder.")
    option = "--resume" if args.resume else "--auto-resume"
    refuse_if(
        (args.resume or args.auto_resume) and args.checkpoint is None,
        f"{option} needs to know from where: name the folder with --checkpoint.",
    )
    refuse_if(
        args.resume and args.auto_resume,
        "--resume refuses a folder without a checkpoint, and --auto-resume starts at step 0 there: give one "
        "of them.",
    )
    mine, parts = args.batch_size // sharing, args.grad_acc_steps
    refuse_if(parts < 1, f"--grad-acc-steps {parts}: there must be at least one.")
    fits = sharing * parts
    refuse_if(
        mine % parts > 0,
        f"--grad-acc-steps {parts} must divide the {mine} examples that a rank has in a step; "
        f"take a multiple of {fits} for --batch-size, such as {-(-args.batch_size // fits) * fits}.",
    )
    if (cap := args.bucket_mb) is not None:
        is_cap = 0 < cap < math.inf
        refuse_if(not is_cap, f"--bucket-mb {cap:g}: a bucket's cap is a number of MiB above 0, such as 4.")
    if (clip := args.clip) is not None:
        refuse_if(not clip > 0, f"--clip {clip:g}: the largest norm is a number above 0.")
    first = args.ignore_first
    refuse_if(first < 0, f"--ignore-first {first}: it is a number of targets, or 0 for none.")
    refuse_if(first > 0 and args.model != "gpt", "--ignore-first works with text only: leave --model out.")
    every = args.eval_every
    refuse_if(every < 0, f"--eval-every {every}: it is a number of steps, or 0 for the end only.")
    refuse_if(
        args.transport != "auto" and dist.get_backend() == "nccl",
        f"--transport {args.transport}: nccl has its own; leave it out or take BACKEND=gloo.",
    )
    is_gpt = args.metronome is None or args.model == "gpt"
    refuse_if(not is_gpt, "--metronome works with the GPT only; leave --model out.")


def validate_numbers(steps: int, batch_size: int, lr: float, seed: int, sharing: int) -> None:
    """Refuse what no run can train with; `sharing` ranks share a batch."""
    refuse_if(steps < 1, f"--steps {steps}: there must be at least one.")
    refuse_if(batch_size < 1, f"--batch-size {batch_size}: there must be at least one example.")
    is_large = batch_size > MAX_BATCH
    refuse_if(is_large, f"--batch-size {batch_size}: there can be at most {MAX_BATCH} examples.")
    is_rate = 0 < lr < math.inf
    refuse_if(not is_rate, f"--lr {lr:g}: a learning rate is a number above 0, such as 0.001.")
    is_seed = 0 <= seed < SEEDS
    refuse_if(not is_seed, f"--seed {seed}: a seed is a whole number from 0 to {SEEDS - 1}.")
    more = (batch_size // sharing + 1) * sharing
    refuse_if(
        batch_size % sharing,
        f"{sharing} ranks cannot share a batch of {batch_size} examples equally; choose a multiple of "
        f"{sharing}, such as --batch-size {more}.",
    )


def validate_nccl(cluster: Cluster, what: str) -> None:
    """Refuse a technique of PyTorch's own on GPUs with gloo, which would read their memory as the host's."""
    if cluster.device.type == "cuda" and dist.get_backend() != "nccl":
        raise WorkbookError(
            f"{what} sends tensors of GPUs by itself, which only nccl can; leave BACKEND out and give each "
            "rank a GPU of its own, or train on the CPU with CUDA_VISIBLE_DEVICES= in front of the command."
        )


def tick_seconds(metronome: str) -> float:
    """Return the seconds of `--metronome`."""
    try:
        return units.seconds(metronome)
    except WorkbookError as error:
        raise WorkbookError(f"--metronome {metronome}: {error}.") from error


def validate_folder(cluster: Cluster, option: str, name: str) -> None:
    """Refuse, on all ranks, a folder in which rank 0 cannot write. Create it."""
    on_main(cluster, option, lambda: _try_to_write(option, name, 0))


def validate_shared_folder(cluster: Cluster, option: str, name: str) -> None:
    """Refuse, on all ranks, a folder that is not the same for all, or in which one of them cannot write."""
    validate_folder(cluster, option, name)
    with ExitStack() as until_seen:
        mark = tempfile.NamedTemporaryFile
        made = on_main(cluster, option, lambda: until_seen.enter_context(mark(dir=name)).name)

        def look() -> None:
            if not (Path(name) / Path(made).name).exists():
                raise WorkbookError(
                    f"{option} {name}: rank {cluster.rank} does not see what rank 0 writes there; "
                    "name a folder that all machines share."
                )
            _try_to_write(option, name, cluster.rank)

        on_all(option, look)


def _try_to_write(option: str, name: str, rank: int) -> None:
    try:
        Path(name).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=name, buffering=0) as file:
            file.write(b"a full disk takes a file, but nothing in it")
    except OSError as error:
        why = error.strerror or error
        raise WorkbookError(
            f"{option} {name}: rank {rank} cannot write there ({why}); name another folder."
        ) from error
