import pytest

from lab.cluster import Cluster
from lab.errors import WorkbookError
from lab.ranks import run_ranks
from lab.together import on_all, on_main


def test_everybody_learns_what_each_rank_found_and_what_rank_0_alone_found():
    def work(cluster: Cluster) -> tuple[list[int], int]:
        return on_all("count", lambda: cluster.rank), on_main(cluster, "count", lambda: cluster.rank + 7)

    assert run_ranks(work, 3) == [([0, 1, 2], 7)] * 3


@pytest.mark.parametrize("failing", [0, 2])
def test_what_the_system_refuses_one_rank_is_every_ranks_error_in_a_sentence(failing, tmp_path):
    def work(cluster: Cluster) -> str:
        def action() -> None:
            if cluster.rank == failing:
                (tmp_path / "missing").read_bytes()

        with pytest.raises(WorkbookError) as caught:
            on_all("read it", action)
        return str(caught.value)

    assert run_ranks(work, 3) == [f"cannot read it: No such file or directory ({tmp_path / 'missing'})"] * 3


def test_a_bug_of_one_rank_keeps_its_class_there_and_ends_the_others_too():
    def work(cluster: Cluster) -> str:
        with pytest.raises((KeyError, WorkbookError)) as caught:
            on_main(cluster, "look it up", lambda: {}["name"])
        return type(caught.value).__name__

    assert run_ranks(work, 2) == ["KeyError", "WorkbookError"]
