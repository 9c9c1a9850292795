"""The loss on held-out data counts every example once, and evaluating leaves the training as it is.

tests/test_scripts.py compares the loss of every mode with that of one process.
"""

import dataclasses
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from lab.cluster import Cluster
from lab.models.digits import load_digits
from lab.models.model import SIZES, loss_of
from lab.models.text import load_corpus, split
from lab.ranks import run_ranks
from tests.on_ranks import on_ranks
from tests.training.attempts import train
from training.evaluation import held_out_means, sums_of
from training.run import Run

DIGITS: dict[str, Any] = {"model": "baby_cnn", "steps": 2, "batch_size": 120, "lr": 1e-2}
MODES_OF_DIGITS = ("ddp", "fsdp", "pipeline_afab", "pipeline_1f1b")


def means(outputs: Tensor, y: Tensor) -> tuple[float, float]:
    return loss_of(outputs, y).item(), (outputs.argmax(-1) == y).double().mean().item()


def trained(cluster: Cluster, mode: str, **changes: Any) -> tuple[dict[str, Any], nn.Module]:
    """Return the report of a run, and the model that it has trained."""
    models, finish = [], Run.finish

    def keeping(self: Run, model: nn.Module, **extras: Any) -> dict[str, Any]:
        models.append(model)
        return finish(self, model, **extras)

    with mock.patch.object(Run, "finish", keeping):
        return train(cluster, mode, **changes), models[0]


def test_digits_have_an_accuracy_too_over_all_test_images_each_counted_once():
    def one_process(cluster: Cluster) -> tuple[float, float]:
        report, model = trained(cluster, "cnn", **DIGITS)
        *_, images, labels = load_digits()
        with torch.no_grad():
            expected = means(model(images), labels)  # of 360 images in 3 batches, 63 are repeated
        assert (report["validation_loss"], report["validation_accuracy"]) == pytest.approx(expected)
        return expected

    def work(cluster: Cluster) -> dict[str, dict[str, Any]]:
        return {mode: train(cluster, mode, **DIGITS) for mode in MODES_OF_DIGITS}

    [(loss, accuracy)] = run_ranks(one_process, 1)
    for by_mode in run_ranks(work, 2):
        for mode, report in by_mode.items():
            assert report["validation_loss"] == pytest.approx(loss, rel=1e-4), mode
            assert report["validation_accuracy"] == pytest.approx(accuracy, abs=1.01 / 297), mode


def test_all_ranks_report_the_means_over_the_examples_of_all_ranks():
    random = torch.Generator().manual_seed(0)
    outputs, y = torch.randn(7, 5, generator=random), torch.randint(5, (7,), generator=random)

    def work(cluster: Cluster) -> tuple[float, float]:
        share = slice(*[(0, 4), (4, 7), (7, 7)][cluster.rank])  # the last rank has no example
        batches = [(outputs[share], y[share], torch.ones(len(y[share]), dtype=torch.bool))]
        return held_out_means(batches, sums_of, len(y), cluster.device, "ring")

    loss, accuracy = means(outputs.double(), y)
    for of_rank in run_ranks(work, 3):
        assert of_rank == pytest.approx((loss, accuracy), rel=1e-6)


@on_ranks(1)
def test_what_is_validated_is_not_trained_on_and_not_dropped_out(cluster: Cluster):
    with mock.patch.dict(SIZES, tiny=dataclasses.replace(SIZES["tiny"], dropout=0.5)):
        report, model = trained(cluster, "naive")
    assert model.training
    _, corpus = split(load_corpus())
    starts = [i * (len(corpus) - 33) // 24 for i in range(24)]  # windows that lie evenly
    x, y = (torch.stack([corpus[s + shift :][:32] for s in starts]).long() for shift in (0, 1))
    with torch.no_grad():
        assert report["validation_loss"] == pytest.approx(means(model.eval()(x), y)[0], rel=1e-6)


def test_evaluating_after_every_step_changes_neither_the_training_nor_what_a_step_sends(capfd):
    modes = ("bucket", "zero3", "pipeline_1f1b")

    def work(cluster: Cluster) -> None:
        for mode in modes:
            at_the_end, often = (train(cluster, mode, steps=2, eval_every=every) for every in (0, 1))
            for field in ("replica_digest", "last_loss", "validation_loss"):
                assert often[field] == at_the_end[field], field
            for report in (at_the_end, often):
                assert report["bytes_sent"] == report["bytes_formula"]
                assert report["messages_sent"] == report["messages_formula"]
            assert often["validation_bytes_sent"] == 2 * at_the_end["validation_bytes_sent"] > 0
        ticking = train(cluster, "naive", metronome="1ms", eval_every=1)
        assert not [key for key in ticking if key.startswith("validation")]

    run_ranks(work, 2)
    lines = [line for line in capfd.readouterr().err.splitlines() if "validation loss" in line]
    # The last one is in the report.
    assert [line.split("step ")[1].split()[0] for line in lines] == ["1/2"] * len(modes)
