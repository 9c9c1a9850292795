import pytest

from lab import units
from lab.launch.errors import WorkbookError
from lab.units import show_bytes, show_rate, show_seconds


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


def test_a_time_of_more_than_a_week_is_refused():
    with pytest.raises(WorkbookError, match="'604801s' is more than a week; write a time such as 2ms"):
        units.seconds("604801s")


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.07597, "75.97 ms"),
        (1.25, "1.250 s"),
        (1234.5, "1,234 s"),
        (3.14e-5, "31.40 us"),
        (2.5e-10, "0.2500 ns"),
        (0.99996, "1.000 s"),
        (0.0009999, "999.9 us"),
    ],
)
def test_a_time_is_shown_in_the_unit_that_suits_it_with_four_digits(value, shown):
    assert show_seconds(value) == shown
    assert show_seconds(0.0) == "0 s"


def test_a_size_and_a_rate_are_shown_in_the_unit_that_suits_them():
    assert (show_bytes(774_900), show_bytes(3.3e6), show_bytes(12)) == ("774.9 kB", "3.3 MB", "12 bytes")
    assert show_rate(8e-9 / 19.2) == "19.20 Gbit/s"
    assert show_rate(0.0) == "too fast to measure"
