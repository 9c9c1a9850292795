"""The loss on held-out data is one process's in every mode, and leaves the training as it is."""

import dataclasses
import functools
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import training.run
from comm.cost import Link
from lab.cluster import Cluster
from lab.models.digits import load_digits
from lab.models.model import SIZES, loss_of
from lab.models.text import load_corpus, split
from lab.ranks import run_ranks
from pipeline_parallel import train_torch_pipelining
from tensor_parallel import train_dtensor
from tests.data_parallel import test_scripts
from tests.pipeline_parallel import test_scripts as pipeline_scripts
from tests.tensor_parallel import test_scripts as tensor_scripts
from tests.zero import test_scripts as zero_scripts
from training.evaluation import held_out_means, sums_of

SAME: dict[str, Any] = {"steps": 2, "batch_size": 24, "size": "tiny", "lr": 3e-3, "seed": 0}
DIGITS: dict[str, Any] = {"model": "baby_cnn", "batch_size": 120, "lr": 1e-2}


def data_parallel(name: str, cluster: Cluster, **changes: Any) -> dict[str, Any]:
    return zero_scripts.train(cluster, name, **SAME | changes)


def tensor_parallel(name: str, cluster: Cluster, **changes: Any) -> dict[str, Any]:
    return tensor_scripts.summary(cluster, name, **SAME | changes)


def pipeline_parallel(name: str, cluster: Cluster, **changes: Any) -> dict[str, Any]:
    return pipeline_scripts.summary(cluster, name, layers=2, **SAME | changes)


def native(module: Any, args: Any, cluster: Cluster, **changes: Any) -> dict[str, Any]:
    """Return the summary of a script of PyTorch's own technique."""
    summaries: list[dict[str, Any]] = []
    finish = training.run.Run.finish

    def noting(*args: Any, **extras: Any) -> dict[str, Any]:
        summaries.append(finish(*args, **extras))
        return summaries[-1]

    link = Link(1e-4, 1e-9)
    with (
        mock.patch.object(training.run.Run, "finish", noting),
        mock.patch("training.run.measure_all_reduce", lambda pattern, **_: link),
        mock.patch("pipeline_parallel.script.measure_link", lambda **_: link),
    ):
        module.main(cluster, dataclasses.replace(args, **SAME | changes))
    return summaries[0]


MODES = {
    **{name: functools.partial(data_parallel, name) for name in test_scripts.GPTS},
    **{name: functools.partial(data_parallel, name) for name in zero_scripts.SCRIPTS},
    **{name: functools.partial(tensor_parallel, name) for name in tensor_scripts.SCRIPTS},
    "dtensor": functools.partial(native, train_dtensor, train_dtensor.Args()),
    "dtensor by tokens": functools.partial(native, train_dtensor, train_dtensor.Args(sequence_parallel=True)),
    **{f"pipeline {n}": functools.partial(pipeline_parallel, n) for n in pipeline_scripts.SCRIPTS},
    "pipelining": functools.partial(
        native, train_torch_pipelining, train_torch_pipelining.Args(layers=2, microbatches=4)
    ),
}
TWO_STAGES_A_RANK = ("pipeline interleaved", "pipeline zb_v")  # the model has 4 parts
MODES_OF_DIGITS = {
    "cnn": functools.partial(data_parallel, "cnn"),
    "fsdp": functools.partial(data_parallel, "fsdp"),
    "pipeline gpipe": functools.partial(pipeline_parallel, "gpipe"),
    "pipeline 1f1b": functools.partial(pipeline_parallel, "1f1b"),
}


def means(outputs: Tensor, y: Tensor) -> tuple[float, float]:
    return loss_of(outputs, y).item(), (outputs.argmax(-1) == y).double().mean().item()


def held_out_text(model: nn.Module) -> float:
    """Return a plain model's loss on 96 windows that lie evenly in the held-out text."""
    _, corpus = split(load_corpus())
    starts = [i * (len(corpus) - 33) // 96 for i in range(96)]
    x, y = (torch.stack([corpus[s + shift :][:32] for s in starts]).long() for shift in (0, 1))
    with torch.no_grad():
        return means(model(x), y)[0]


def plain(script: str, cluster: Cluster, **changes: Any) -> tuple[dict[str, Any], nn.Module]:
    """Return the summary of one process, and the model that it has trained."""
    models, finish = [], training.run.Run.finish

    def keeping(self: Any, model: nn.Module, **extras: Any) -> dict[str, Any]:
        models.append(model)
        return finish(self, model, **extras)

    with mock.patch.object(training.run.Run, "finish", keeping):
        return data_parallel(script, cluster, **changes), models[0]


@functools.cache
def one_process() -> tuple[float, float, float]:
    """Return the validation loss of text, and that and the accuracy of digits, of plain models."""

    def work(cluster: Cluster) -> tuple[float, float, float]:
        _, gpt = plain("naive", cluster)
        _, cnn = plain("cnn", cluster, **DIGITS)
        *_, images, labels = load_digits()
        with torch.no_grad():
            return held_out_text(gpt), *means(cnn(images), labels)

    return run_ranks(work, 1)[0]


def every_mode_agrees_with_one_process(n: int) -> None:
    def work(cluster: Cluster) -> dict[str, dict[str, Any]]:
        return {name: run(cluster) for name, run in MODES.items() if n < 4 or name not in TWO_STAGES_A_RANK}

    for by_name in run_ranks(work, n, timeout=200):
        for name, summary in by_name.items():
            assert summary["validation_loss"] == pytest.approx(one_process()[0], rel=1e-5), name
            assert "validation_accuracy" not in summary


@pytest.mark.parametrize("n", [2, 4])
def test_digits_have_an_accuracy_too_over_all_test_images(n: int):
    def work(cluster: Cluster) -> dict[str, dict[str, Any]]:
        return {name: run(cluster, **DIGITS) for name, run in MODES_OF_DIGITS.items()}

    _, loss, accuracy = one_process()
    for by_name in run_ranks(work, n, timeout=100):
        for name, summary in by_name.items():
            assert summary["validation_loss"] == pytest.approx(loss, rel=1e-4), name
            assert summary["validation_accuracy"] == pytest.approx(accuracy, abs=1.01 / 297), name


def test_repeated_images_do_not_count():
    [(summary, [loss, accuracy])] = run_ranks(_digits_in_a_large_batch, 1)
    assert summary["validation_loss"] == pytest.approx(loss, rel=1e-6)
    assert summary["validation_accuracy"] == pytest.approx(accuracy, abs=1e-9)


def _digits_in_a_large_batch(cluster: Cluster) -> tuple[dict[str, Any], list[float]]:
    summary, model = plain("cnn", cluster, **DIGITS | {"batch_size": 250})  # 203 of 500 are repeated
    *_, images, labels = load_digits()
    with torch.no_grad():
        outputs = model(images)
        loss = F.cross_entropy(outputs, labels).item()
    del summary["weights"]
    return summary, [loss, (outputs.argmax(-1) == labels).double().mean().item()]


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


def test_what_is_validated_is_not_trained_on():
    def work(cluster: Cluster) -> tuple[float, float, float]:
        summary, model = plain("naive", cluster, steps=20)
        return summary["validation_loss"], held_out_text(model), summary["last_loss"]

    [(loss, expected, of_training)] = run_ranks(work, 1)
    assert loss == pytest.approx(expected, rel=1e-6) != pytest.approx(of_training, rel=1e-6)


@pytest.mark.parametrize("name", ["bucket", "zero1", "zero3", "fsdp", "sequence_parallel", "pipeline 1f1b"])
def test_evaluating_after_every_step_changes_neither_the_training_nor_what_a_step_sends(name: str):
    def work(cluster: Cluster) -> list[dict[str, Any]]:
        return [MODES[name](cluster, eval_every=every) for every in (0, 1)]

    for at_the_end, often in run_ranks(work, 2):
        for field in ("replica_digest", "last_loss", "validation_loss"):
            assert often[field] == at_the_end[field], field
        for summary in (at_the_end, often):
            assert summary["bytes_sent"] == summary["bytes_formula"]
            assert summary["messages_sent"] == summary["messages_formula"]
        assert often["validation_bytes_sent"] == 2 * at_the_end["validation_bytes_sent"] > 0


def test_nothing_is_dropped_out():
    def work(cluster: Cluster) -> tuple[float, float]:
        with mock.patch.dict(SIZES, tiny=dataclasses.replace(SIZES["tiny"], dropout=0.5)):
            summary, model = plain("naive", cluster)
        assert model.training  # it can be trained on
        model.eval()
        return summary["validation_loss"], held_out_text(model)

    [(loss, expected)] = run_ranks(work, 1)
    assert loss == pytest.approx(expected, rel=1e-6)


def test_a_line_tells_the_loss_of_each_evaluation(capfd):
    run_ranks(lambda cluster: data_parallel("naive", cluster, steps=3, eval_every=2) and None, 2)
    lines = [line for line in capfd.readouterr().out.splitlines() if "validation loss" in line]
    assert [line.split("step ")[1].split()[0] for line in lines] == ["2/3"]  # the last one is in the report


def test_under_the_metronome_there_is_no_validation_loss():
    def work(cluster: Cluster) -> list[dict[str, Any]]:
        ticking = {"metronome": "1ms", "eval_every": 1}
        return [MODES[name](cluster, **ticking) for name in ("naive", "pipeline gpipe", "pipeline 1f1b")]

    for summaries in run_ranks(work, 2):
        assert not [key for summary in summaries for key in summary if key.startswith("validation")]
