import json

from lab.trace.chrome_trace import write_chrome_trace
from lab.trace.gantt import Event


def test_the_trace_has_a_process_per_rank_and_a_thread_per_lane_in_microseconds(tmp_path):
    events = [
        Event("all_reduce", "communication", 9_000_002_000, 500, "communication", {"bytes": 8}, rank=1),
        Event("forward", "forward", 9_000_000_000, 3_000, rank=1),
        Event("forward", "forward", 9_000_001_500, 3_000, rank=0),
    ]
    rows = json.loads(write_chrome_trace(tmp_path / "trace.json", events).read_text())["traceEvents"]
    assert all(row["pid"] > 0 and row["tid"] > 0 for row in rows), "Perfetto treats zero as the idle task"
    names = {(row["pid"], row["tid"], row["name"]): row["args"] for row in rows if row["ph"] == "M"}
    assert {args["name"]: pid for (pid, _, what), args in names.items() if what == "process_name"} == {
        "rank 0": 1,
        "rank 1": 2,
    }
    spans = {(row["pid"], row["name"]): row for row in rows if row["ph"] == "X"}
    sent = spans[2, "all_reduce"]
    assert (sent["ts"], sent["dur"], sent["cat"], sent["args"]) == (2.0, 0.5, "communication", {"bytes": 8})
    assert (spans[1, "forward"]["ts"], spans[2, "forward"]["ts"]) == (1.5, 0.0)
    main, side = spans[2, "forward"]["tid"], sent["tid"]
    assert names[2, main, "thread_name"]["name"] == "main"
    assert names[2, side, "thread_name"]["name"] == "communication"
    order = [names[2, tid, "thread_sort_index"]["sort_index"] for tid in (main, side)]
    assert order == [0, 1] and len({row["tid"] for row in spans.values()}) == 3


def test_spans_that_cross_in_one_lane_get_threads_of_their_own_in_the_trace(tmp_path):
    crossing = [Event(f"bucket {i}", "communication", 10 * i, 15, "communication") for i in range(4)]
    nested = [Event("outer", "compute", 0, 100), Event("inner", "compute", 10, 20)]
    path = write_chrome_trace(tmp_path / "trace.json", crossing + nested)
    threads = {
        row["name"]: row["tid"] for row in json.loads(path.read_text())["traceEvents"] if row["ph"] == "X"
    }
    assert threads["outer"] == threads["inner"]
    assert threads["bucket 0"] == threads["bucket 2"] != threads["bucket 1"] == threads["bucket 3"]


def test_the_trace_is_strict_json_even_with_a_loss_that_is_not_a_number(tmp_path):
    events = [Event("step", "compute", 0, 1, args={"loss": float("nan"), "all": [float("inf")]})]
    text = write_chrome_trace(tmp_path / "trace.json", events).read_text()

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    assert json.loads(text, parse_constant=refuse)["traceEvents"][-1]["args"]["loss"] == "nan"
