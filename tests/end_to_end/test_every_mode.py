"""Every RUN_MODE runs without options on 1, 3, 4, 6 and 8 ranks. test_defaults.py does it on 2."""

from unittest import mock

import pytest
import tyro

from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.ranks import run_ranks
from tests.end_to_end.test_defaults import NAMES, at_once, refuse_failures
from tests.run_modes import few_steps, start_of
from tests.training.test_evaluation import every_mode_agrees_with_one_process
from training.run import Run


class TheLoopBegins(Exception):
    """Raised where a run would take its first step."""


def test_every_mode_trains_with_its_defaults_on_four_ranks():
    refuse_failures(4)


@pytest.mark.parametrize("world_size", [2, 4])
def test_the_validation_loss_of_every_mode_is_one_processs(world_size: int):
    every_mode_agrees_with_one_process(world_size)


@pytest.mark.parametrize("world_size", [1, 3, 6, 8])
def test_every_mode_accepts_its_defaults_and_begins_to_train(world_size: int):
    @at_once
    def work(cluster: Cluster) -> list[str]:
        begun = []
        for mode in NAMES:
            main, arguments = start_of(mode)
            args = tyro.cli(arguments, args=few_steps(mode))
            with mock.patch.object(Run, "step", side_effect=TheLoopBegins):
                try:
                    main(cluster, args)
                except TheLoopBegins:
                    pass
                except WorkbookError as error:
                    assert mode == "point_to_point" and cluster.world_size == 1, f"{mode}: {error}"
                    assert str(error).endswith("(WORLD_SIZE=2).")  # says how to start two
                    continue
            begun.append(mode)
        return begun

    alone = {"point_to_point"} if world_size == 1 else set()
    for begun in run_ranks(work, world_size, timeout=300):
        assert set(begun) == set(NAMES) - alone
