"""Training that goes on from a checkpoint of shards: with as many ranks or others, and other buckets."""

import itertools
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lab import checkpoint
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.ranks import run_ranks
from tests.zero.sharded_training import (
    BUCKETS,
    FLAT,
    OPTIMIZERS,
    SHAPES,
    Training,
    same,
)
from zero import sharded_checkpoint


@pytest.mark.parametrize(
    ("world_size", "dtype"), [(1, torch.float32), (3, torch.float32), (2, torch.float64)]
)
def test_resumed_training_ends_with_the_bits_of_uninterrupted_training(tmp_path, world_size, dtype):
    def work(cluster: Cluster) -> None:
        for name in OPTIMIZERS:
            at_once = Training(cluster, name, dtype=dtype)
            at_once.train(2)
            at_once.save(cluster, tmp_path / name)
            resumed = Training(cluster, name, seed=1 + cluster.rank, dtype=dtype, lr=7.0)
            resumed.load(cluster, tmp_path / name)
            assert same(resumed.states(), at_once.states())
            at_once.train(3)
            resumed.train(3)
            assert same(resumed.result(), at_once.result())
            assert same(resumed.states(), at_once.states())
            assert same(resumed.rest, at_once.rest)

    run_ranks(work, world_size)


@pytest.mark.parametrize(("before", "after"), [(4, 3), (4, 1), (1, 4)])
def test_another_number_of_ranks_with_other_buckets_resumes_with_equal_results(tmp_path, before, after):
    def first(cluster: Cluster) -> None:
        for name in ("adamw", "momentum", "counting"):
            training = Training(cluster, name, FLAT)
            training.train(2)
            training.save(cluster, tmp_path / name)

    def second(cluster: Cluster) -> dict[str, dict[str, Tensor]]:
        results = {}
        for name in ("adamw", "momentum", "counting"):
            training = Training(cluster, name, BUCKETS, seed=1 + cluster.rank)
            training.load(cluster, tmp_path / name)
            training.train(3)
            results[name] = training.result()
        return results

    def at_once(cluster: Cluster) -> dict[str, dict[str, Tensor]]:
        trainings = {name: Training(cluster, name) for name in ("adamw", "momentum", "counting")}
        for training in trainings.values():
            training.train(5)
        return {name: training.result() for name, training in trainings.items()}

    run_ranks(first, before)
    [expected] = run_ranks(at_once, 1)
    for results in run_ranks(second, after):
        for optimizer, parameters in expected.items():
            for name, value in parameters.items():
                torch.testing.assert_close(results[optimizer][name], value, rtol=1e-9, atol=0)


def test_a_parameter_that_was_never_used_has_no_optimizer_state_after_a_load(tmp_path):
    def work(cluster: Cluster) -> set[str]:
        training = Training(cluster, "adamw")
        training.train(1)
        training.save(cluster, tmp_path)
        for used in (False, True):
            fresh = Training(cluster, "adamw", BUCKETS)
            if used:  # what is loaded replaces what there was
                fresh.pieces["never"].tensor.grad = torch.ones_like(fresh.pieces["never"].tensor)
                fresh.optimizer.step()
            fresh.load(cluster, tmp_path)
            assert {name for name, state in fresh.states().items() if state} == SHAPES.keys() - {"never"}
        return set(fresh.states()["first.bias"])

    assert run_ranks(work, 2) == [{"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}] * 2


@pytest.mark.parametrize("optimizer", ["adamw", "adagrad"])  # Adagrad has a state of frozen ones, too
@pytest.mark.parametrize(("before", "after"), [("pieces", "rest"), ("rest", "pieces")])
def test_a_frozen_parameter_may_be_sharded_in_one_stage_and_full_in_another(
    tmp_path, before, after, optimizer
):
    def work(cluster: Cluster) -> None:
        training = Training(cluster, optimizer, frozen=before)
        training.train(1)
        training.save(cluster, tmp_path)
        other = Training(cluster, optimizer, BUCKETS, seed=1 + cluster.rank, frozen=after)
        had = set(other.states().get("never", {}))
        other.load(cluster, tmp_path)
        assert same(other.result(), training.result())
        assert set(other.states().get("never", {})) == had
        with pytest.raises(WorkbookError, match="groups"):
            Training(cluster, optimizer).load(cluster, tmp_path)
        for one in (training, other):
            one.train(2)
        assert same(other.result(), training.result())

    run_ranks(work, 3)


def test_a_load_restores_the_hyperparameters_of_each_group(tmp_path):
    def work(cluster: Cluster) -> list[dict[str, Any]]:
        training = Training(cluster, "adamw", weight_decay=0.3, betas=(0.8, 0.9))
        scheduler = torch.optim.lr_scheduler.StepLR(training.optimizer, 1, gamma=0.5)
        training.train(1)
        scheduler.step()
        training.save(cluster, tmp_path)
        fresh = Training(cluster, "adamw", BUCKETS)
        fresh.load(cluster, tmp_path)
        return [
            {key: group[key] for key in ("lr", "betas", "weight_decay", "initial_lr")}
            for group in fresh.optimizer.param_groups
        ]

    for groups in run_ranks(work, 2):
        for lr, group in zip((0.1, 0.05), groups, strict=True):
            assert group.pop("betas") == (0.8, 0.9)
            assert group == pytest.approx({"lr": lr * 0.45, "weight_decay": 0.3, "initial_lr": lr})


def test_extra_values_are_restored_on_every_rank(tmp_path):
    extra = {"step": 12, "made_with": {"lr": 0.1, "link": None, "model": "gpt"}, "shape": (1, 2), 3: [True]}

    def work(cluster: Cluster) -> dict[str, Any]:
        training = Training(cluster, "sgd")
        sharded_checkpoint.save(cluster, str(tmp_path), training.pieces, training.optimizer, extra)
        return sharded_checkpoint.load(cluster, str(tmp_path), training.pieces, training.optimizer)

    assert all(same(found, extra) for found in run_ranks(work, 2))
    assert os.listdir(tmp_path) == ["checkpoint-1"]


def test_an_edited_header_is_refused_in_one_sentence_by_all_ranks(tmp_path):
    keys = ("shapes", "optimizer", "options", "numbers")
    values: list[Any] = [None, -1, "some", [], {"some": 1}, [{}, 2]]

    def work(cluster: Cluster) -> list[str]:
        training = Training(cluster, "counting")
        training.train(1)
        training.save(cluster, tmp_path)
        folder = tmp_path / "checkpoint-1"
        header = checkpoint.unpack(checkpoint.read(folder), "")
        said = []
        for key, value in itertools.product(keys, values):
            if cluster.is_main:
                checkpoint.write(folder, header | {key: value})
            dist.barrier()
            try:
                training.load(cluster, tmp_path)
            except WorkbookError as error:
                said.append(str(error))
            dist.barrier()
        return said

    first, other = run_ranks(work, 2)
    assert first == other
    assert all(str(tmp_path) in sentence and "\n" not in sentence for sentence in first)
    assert len(first) == len(keys) * len(values) - 1  # {"some": 1} may be a number of another parameter


MISFITS: list[tuple[str, dict[str, Any], str]] = [
    ("adamw", {"shapes": SHAPES | {"first.weight": (5, 3)}}, r"first.weight has shape \(3, 5\).*\(5, 3\)"),
    ("adamw", {"shapes": SHAPES | {"scale": (2,)}}, r"scale has shape \(\) in it"),
    ("adamw", {"shapes": SHAPES | {"more": (2,)}, "buckets": [[*SHAPES, "more"]]}, "more is missing in it"),
    ("adamw", {"shapes": {"scale": ()}, "buckets": [["scale"]]}, "first.weight .* is missing in this one"),
    ("adamw", {"split": 3}, "groups"),
    ("momentum", {}, "another optimizer"),
    ("adagrad", {}, "another optimizer"),
]


def test_a_checkpoint_of_another_model_or_optimizer_is_refused_in_one_sentence_by_all_ranks(tmp_path):
    def work(cluster: Cluster) -> list[str]:
        Training(cluster, "adamw").save(cluster, tmp_path)
        said = []
        for optimizer, options, _ in MISFITS:
            training = Training(cluster, optimizer, **options)
            before = training.result()
            with pytest.raises(WorkbookError) as caught:
                training.load(cluster, tmp_path)
            assert same(training.result(), before)
            said.append(str(caught.value))
        return said

    for (_, _, words), *texts in zip(MISFITS, *run_ranks(work, 2), strict=True):
        [sentence] = set(texts)
        assert "\n" not in sentence and str(tmp_path) in sentence
        with pytest.raises(WorkbookError, match=words):
            raise WorkbookError(sentence)
