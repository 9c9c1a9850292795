"""Show the problem: every rank trains alone on its share of the data, and the replicas drift apart.

      rank 0   w ──► w0' ──► w0''         The ranks start from the same weights, but see different data. After
      rank 1   w ──► w1' ──► w1''         a few steps there are as many models as ranks, each trained on 1/n
      rank 2   w ──► w2' ──► w2''         of the data, and each worse than a model that was trained on all.

The training communicates nothing, so n ranks process n times as many examples a second, but the result is n
poor models. In the next script, train_naive.py, the ranks agree on one gradient before every step.

The drift of a rank is |w - mean w| / |mean w| over all its parameters. It is 0 while the replicas are equal.
After each epoch the ranks exchange their drifts and accuracies for a table; the report leaves these bytes
out. Where the report counts tokens, they are images here.
"""

import dataclasses
import itertools

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn.utils import parameters_to_vector
from torch.utils.data import DataLoader, TensorDataset

from comm.collectives import all_reduce
from comm.exchange import exchange
from comm.same_start import check_same_start
from comm.script import start
from data_parallel.sampler import DistributedSampler
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.models.digits import load_digits
from lab.models.model import BabyCNN
from lab.trace.meter import Meter
from training.arguments import given
from training.report import print_report, replica_digests
from training.validate import validate_numbers


@dataclasses.dataclass
class Args:
    """Every rank trains a small CNN on its share of the handwritten digits, alone."""

    epochs: int = 8
    """Number of passes through the training images."""
    steps: int | None = None
    """Largest number of optimizer steps. None: as many as the epochs have."""
    batch_size: int = 48
    """Number of images in a step, over all ranks together; each rank takes an equal part."""
    lr: float = 0.1
    """Learning rate: the factor of the optimizer's update, a number without unit."""
    seed: int = 0
    """Number from which the initial weights and the order of the images are drawn; equal seeds give equal
    runs."""
    verbose: bool = False
    """Print all rows of the report (docs/report.md), not only the most important ones."""
    json: bool = False
    """Print the report as one line of JSON at the end, on stdout; everything else goes to stderr."""


def drift(model: nn.Module) -> list[float]:
    """Return for each rank how far its replica is from the mean of all replicas, relative to that mean."""
    mine = parameters_to_vector(model.parameters()).detach()
    mean = mine.clone()
    all_reduce(mean, op="mean")
    return exchange(((mine - mean).norm() / mean.norm()).item())


def accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the share of images that the model labels correctly."""
    with torch.no_grad():
        return (model(images).argmax(dim=1) == labels).double().mean().item()


def main(cluster: Cluster, args: Args) -> None:
    data = load_digits()
    check_same_start(data[0], {"RUN_MODE": "train"} | given(args))
    images, labels, test_images, test_labels = (tensor.to(cluster.device) for tensor in data)
    asked = 1 if args.steps is None else args.steps
    validate_numbers(asked, args.batch_size, args.lr, args.seed, cluster.world_size)
    if args.epochs < 1:
        raise WorkbookError(f"--epochs {args.epochs}: there must be at least one.")
    sampler = DistributedSampler(len(images), cluster.rank, cluster.world_size, args.seed)
    loader = DataLoader(
        TensorDataset(images, labels), batch_size=args.batch_size // cluster.world_size, sampler=sampler
    )
    model = BabyCNN(seed=args.seed).to(cluster.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    steps = min(args.steps or args.epochs * len(loader), args.epochs * len(loader))
    meter = Meter(cluster, "train", steps, tokens_per_step=args.batch_size, as_json=args.json, unit="images")
    table = Table("epoch", "accuracy of each replica", "drift of each replica")

    done = 0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in itertools.islice(loader, steps - done):
            with meter.step() as record:
                loss = F.cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                record.loss = loss
            done += 1
        accuracies = exchange(accuracy(model, test_images, test_labels))
        drifts = drift(model)
        table.add_row(
            str(epoch + 1), *("  ".join(f"{value:.3f}" for value in row) for row in (accuracies, drifts))
        )
        if done == steps:
            break

    if cluster.is_main:
        Console(stderr=args.json).print(table)
    replicas_equal = len(set(replica_digests(cluster, model))) == 1
    figures = meter.finish(accuracy=accuracies, drift=drifts, replicas_equal=replicas_equal)
    meaning = "Each rank has trained a model of its own, on its part of the data."
    print_report(cluster, figures, args.json, args.verbose, meaning=meaning)


if __name__ == "__main__":
    start(main, Args)
