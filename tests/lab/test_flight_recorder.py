"""The dumps of real ranks say which rank, which operation and which line is the cause."""

import time

import pytest
import torch
import torch.distributed as dist

from lab.launch.errors import WorkbookError
from lab.ranks import RankError, run_ranks
from lab.trace.black_box import black_box
from lab.trace.flight_recorder import analyse, load, main


def recorded(folder, mistake) -> list[str]:
    """Run a mistake on 3 ranks that record, and return what the analysis of their dumps says."""

    def work(cluster):
        with black_box(folder, cluster.rank, every=0.1):
            dist.all_reduce(torch.ones(4))
            mistake(cluster.rank)

    run_ranks(work, 3, group_timeout=1.0, collect_failures=True)
    return analyse(load(folder))


def test_ranks_that_agree_are_said_to_agree_by_the_command_too(tmp_path, capsys):
    sentences = recorded(tmp_path, lambda rank: dist.broadcast(torch.ones(2), 0))
    assert sentences == ["The ranks have called the same collectives, and all of them have ended."]
    main(tmp_path)
    assert capsys.readouterr().out.splitlines() == sentences


def test_a_different_order_names_both_operations_and_their_lines(tmp_path):
    def mistake(rank):
        if rank == 1:
            dist.broadcast(torch.ones(4), 0)
        dist.all_reduce(torch.ones(4))

    head, many, one, _ = recorded(tmp_path, mistake)
    assert "(ranks 0, 1 and 2), collective 3: the ranks have called different operations" in head
    assert "ranks 0 and 2 called all_reduce" in many and many.endswith("dist.all_reduce(torch.ones(4))")
    assert "rank 1 called broadcast" in one and one.endswith("in mistake: dist.broadcast(torch.ones(4), 0)")


def test_different_dtypes_are_shown_though_gloo_adds_them_up_without_an_error(tmp_path):
    def mistake(rank):
        dist.all_reduce(torch.ones(4, dtype=torch.int32 if rank == 1 else torch.float32))

    head, *lines = recorded(tmp_path, mistake)
    assert "the tensors of all_reduce differ" in head
    shown = [line.split(", at")[0].strip() for line in lines]
    assert shown == ["ranks 0 and 2: (4) Float", "rank 1: (4) Int"]


def test_a_rank_that_has_left_early_is_named(tmp_path):
    def mistake(rank):
        if rank != 1:
            dist.all_reduce(torch.ones(4))

    waiting, absent = recorded(tmp_path, mistake)
    assert "ranks 0 and 2 wait in all_reduce" in waiting
    assert absent == "  Rank 1 has not called it: it has ended"


def test_a_rank_that_hangs_in_a_receive_is_named_with_the_line_although_gloo_does_not_record_it(tmp_path):
    def hang(cluster):
        with black_box(tmp_path, cluster.rank, every=0.1):
            if cluster.rank == 1:
                dist.recv(torch.ones(4), 0)
            dist.all_reduce(torch.ones(4))

    with pytest.raises(RankError):
        run_ranks(hang, 3, timeout=2)
    _, absent = analyse(load(tmp_path))
    assert "Rank 1 has not called it: it was at" in absent and "dist.recv(torch.ones(4), 0)" in absent


def test_a_straggler_is_named_and_a_rank_that_is_late_once_is_not(tmp_path):
    def mistake(rank):
        for step in range(8):
            if rank == 2 or (rank == 1 and step == 0):
                time.sleep(0.04)
            dist.all_reduce(torch.ones(4))

    [sentence] = recorded(tmp_path, mistake)
    assert "rank 2 is a straggler" in sentence


def test_a_folder_without_dumps_and_a_file_that_is_none_are_refused(tmp_path):
    with pytest.raises(WorkbookError, match="has no dump"):
        load(tmp_path)
    (tmp_path / "rank_0").write_text('{"entries": []}')
    with pytest.raises(WorkbookError, match="is no dump"):
        load(tmp_path)
