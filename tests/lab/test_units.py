import pytest

from lab import units
from lab.errors import WorkbookError


def test_times_and_rates_are_read_as_tc_reads_them():
    assert [units.seconds(text) for text in ("500us", "0.2ms", "20ms", "1.5s")] == [5e-4, 2e-4, 0.02, 1.5]
    rates = [units.bytes_per_second(text) for text in ("800kbit", "200mbit", "1Gbit", "2.5gbit")]
    assert rates == [1e5, 25e6, 125e6, 312.5e6]


@pytest.mark.parametrize("text", ["", "20", "ms", "-1ms", "1gbit", "1 ms", "nanms"])
def test_what_is_not_a_time_is_refused_with_an_example(text: str):
    with pytest.raises(WorkbookError, match="is not a time; write one such as 2ms"):
        units.seconds(text)


@pytest.mark.parametrize("text", ["", "100", "0mbit", "100mb", "-1gbit", "infgbit"])
def test_what_is_not_a_rate_is_refused_with_an_example(text: str):
    with pytest.raises(WorkbookError, match="is not a rate; write one such as 100mbit"):
        units.bytes_per_second(text)


def test_a_time_of_more_than_a_week_is_refused_for_no_clock_can_wait_so_long():
    with pytest.raises(WorkbookError, match="'604801s' is more than a week; write a time such as 2ms"):
        units.seconds("604801s")
