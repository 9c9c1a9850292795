"""The table of benchmarks/table.py: what it runs, how it counts, and that the pages show what is stored."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import tyro

from benchmarks import table_pages, table_runs
from benchmarks.table import Args, chosen, main, plan_in_words, row_of
from benchmarks.table_pages import RESULTS, digest, full_page, limits_of, marked, pages, short_page, write
from benchmarks.table_runs import (
    BATCH_SIZE,
    EXPERTS,
    LINKS,
    MAXIMA,
    SCRIPTS,
    SIZE,
    TECHNIQUES,
    VANILLA,
    WORKERS,
    Job,
    jobs_of,
    run_job,
)
from hybrid_parallel.sizes import ParallelSizes
from lab.launch.errors import WorkbookError
from lab.models.model import GPT, GPTConfig
from lab.ranks import RankError
from tests.run_modes import start_of

NAIVE = next(one for one in TECHNIQUES if one.run_mode == "data_parallel_naive")
TOKENS = BATCH_SIZE * GPTConfig.named(SIZE).block_size
MACHINE = {"cpu": "A processor", "cores": 2, "memory_gb": 16, "system": "Linux 6.1", "python": "3.11.2"}
MACHINE |= {"torch": "2.13.0", "date": "2026-01-01", "load": 0.1}
SETTING = {"size": "8layers", "parameters": 3_600_000, "batch_size": 16, "block_size": 48}
SETTING |= {"timed_steps": 3, "runs": 5}


def plan_of(**sizes: Any) -> dict[str, Any]:
    """Return what a report says about a plan."""
    return {f"axis_{name}": size for name, size in dataclasses.asdict(ParallelSizes(**sizes)).items()}


def made_up() -> dict[str, Any]:
    """Return results with a row for each cell; a cell's number is in its figures."""
    rows, baselines = [], {VANILLA: 1000.0, EXPERTS: 500.0}
    for number, job in enumerate(jobs_of(TECHNIQUES, WORKERS, LINKS), start=1):
        figures = [
            dict.fromkeys(MAXIMA, 1000.0 * number)
            | {"tokens_per_second": 1000.0 + 20 * number + run, "plan": plan_of(data=2, zero=min(run, 3))}
            for run in range(5)
        ]
        rows.append(row_of(job, figures, baselines, steps=5))
    return {"benchmark": "table", "machine": MACHINE, "setting": SETTING, "rows": rows}


def test_the_readmes_and_pictures_show_the_stored_results():
    results = json.loads(RESULTS.read_text())
    for path, section in pages(results).items():
        assert path.read_text()[slice(*marked(path.read_text()))] == section, "run benchmarks/table.py --from"
    for name in table_pages.PICTURES:
        assert digest(results) in (RESULTS.parent / name).read_text()


def test_one_worker_has_no_link_and_no_pipeline():
    alone = [job for job in jobs_of(TECHNIQUES, (1, 2), LINKS) if job.workers == 1]
    assert {job.link for job in alone} == {"loopback"}
    names = {job.technique.name for job in alone}
    assert {"vanilla", "naive", "ZeRO 3"} <= names and not names & {"1F1B", "auto", "naive ring"}
    assert [job.workers for job in jobs_of([VANILLA], (1, 2, 4), LINKS)] == [1]


def test_a_run_is_caught_from_the_script_itself(monkeypatch):
    monkeypatch.setattr(table_runs, "SIZE", "tiny")
    figures = run_job(Job(NAIVE, 2, "loopback"), steps=1)
    sent = sum(4 * parameter.numel() for parameter in GPT(GPTConfig.named("tiny")).parameters())
    assert figures["bytes_per_step"] == sent  # 2 (n-1)/n of the gradients
    assert 0 < figures["memory_bytes"] < figures["peak_memory_bytes"]


def test_the_time_of_a_run_is_from_the_first_ranks_start_to_the_last_ranks_end(monkeypatch):
    same = {"steps": 2, "plan": {}} | dict.fromkeys(MAXIMA, 1.0)
    ranks = [
        same | {"start": 1_000_000_000, "end": 4_000_000_000, "memory_bytes": 7},
        same | {"start": 1_500_000_000, "end": 5_000_000_000},
    ]
    monkeypatch.setattr(table_runs, "run_ranks", lambda *_, **__: ranks)
    figures = run_job(Job(NAIVE, 2, "loopback"), steps=4)
    assert figures["tokens_per_second"] == 2 * TOKENS / 4
    assert figures["memory_bytes"] == 7


def test_a_run_that_fails_is_named_by_its_command(monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise RankError(1, "rank 1 failed")

    monkeypatch.setattr(table_runs, "run_ranks", fail)
    with pytest.raises(
        WorkbookError, match=r"RUN_MODE=data_parallel_naive WORLD_SIZE=2 (.|\n)*rank 1 failed"
    ):
        run_job(Job(NAIVE, 2, "1gbit"), steps=4)


def test_all_techniques_train_the_same_global_batch():
    block_size = GPTConfig.named(SIZE).block_size
    for job in jobs_of(TECHNIQUES, (2,), ["loopback"]):
        options = job.options(steps=4)
        if "--config" in options or job.technique == VANILLA:
            continue  # the batch size of a configuration is that of a device
        args = tyro.cli(start_of(job.technique.run_mode).arguments, args=options)
        assert (args.size, args.batch_size) == (SIZE, BATCH_SIZE)
        assert (args.length or block_size) == block_size


def test_the_table_compares_every_row_with_one_process_that_trains_the_same_model():
    results = made_up()
    for row in results["rows"]:
        against = ("experts with 1 worker", 500.0) if row["what"] == "experts" else ("vanilla", 1000.0)
        assert (row["against"], row["theirs"]) == against
    for page in (short_page(results), full_page(results)):
        assert f"{1000 + 20 * 4 + 2:,} ± 2" in page  # naive with 2 workers at 1 Gbit/s is the fourth
        assert "`experts` trains another model" in page and "500 tokens per second" in page
        starred = [line for line in page.splitlines() if line.startswith("|") and "*" in line]
        assert starred and all(line.startswith("| experts |") for line in starred)
        assert "the fastest is auto" in page  # though experts have a larger ratio


def test_the_full_page_has_a_row_for_every_technique_at_every_place():
    page = full_page(made_up())
    parts = {part.partition("\n")[0]: part for part in page.split("### ")}
    for place in ("1 worker", "2 workers, loopback", "4 workers, 1 Gbit/s"):
        rows = re.findall(r"^\| (\S.*?) \|", parts[place], re.MULTILINE)[2:]
        assert set(rows) | {"vanilla"} == {one.name for one in TECHNIQUES}
    assert "| 1F1B | - | - |" in parts["1 worker"]
    assert "ZeRO 3 (2 of 5 runs), 1 (pipeline) x 2 (data) x" in page
    for mode in SCRIPTS.keys() & {row["run_mode"] for row in made_up()["rows"]} - {"vanilla"}:
        assert f"RUN_MODE={mode} " in parts["The command of each row"]


def test_what_a_machine_cannot_show_follows_from_its_cores():
    assert [len(limits_of(4, cores)) for cores in (2, 4, 64)] == [3, 1, 0]
    assert "cannot be larger than 2" in limits_of(4, 2)[1]


def test_results_are_written_between_the_marks_and_drawn_again_with_the_same_bytes(tmp_path, monkeypatch):
    places = {
        "SHORT": tmp_path / "SHORT.md",
        "FULL": tmp_path / "FULL.md",
        "RESULTS": tmp_path / "table.json",
    }
    for name, path in places.items():
        path.write_text("before\n<!-- table: begin -->\nold\n<!-- table: end -->\nafter\n")
        monkeypatch.setattr(table_pages, name, path)
    results = made_up()
    write(results)
    text, first = places["SHORT"].read_text(), (tmp_path / "memory.svg").read_bytes()
    assert text.startswith("before\n") and text.endswith("-->\nafter\n") and "old" not in text
    write(results)
    assert places["SHORT"].read_text() == text and (tmp_path / "memory.svg").read_bytes() == first
    with pytest.raises(WorkbookError, match="must have the marks"):
        marked("no marks")


def test_the_planner_s_choice_is_said_in_words():
    words = plan_in_words(plan_of(pipeline=2, data=2, microbatches=8, recompute=True))
    assert words.startswith("2 (pipeline) x 2 (data) x ")
    assert words.endswith(", 8 microbatches, schedule 1f1b, recompute")


def test_some_techniques_can_be_chosen_and_what_they_are_compared_with_is_measured():
    jobs = chosen(Args(only=("ZeRO-3", "1f1b")))
    assert {job.technique.name for job in jobs} == {"vanilla", "ZeRO 3", "1F1B"}
    quick = {(job.technique.name, job.workers) for job in chosen(Args(only=("experts",), quick=True))}
    assert quick == {("vanilla", 1), ("experts", 1), ("experts", 2)}


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (Args(only=("zero-4",)), "There is no technique 'zero-4': choose among vanilla, naive, "),
        (Args(runs=0), "--runs and --steps are numbers of at least 1"),
        (Args(stored=Path("none.json")), "cannot be read as stored results"),
    ],
)
def test_a_wrong_option_is_one_sentence(args: Args, sentence: str):
    with pytest.raises(WorkbookError, match=sentence):
        main(args)
