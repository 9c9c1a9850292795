import pytest

from lab import units
from lab.launch.errors import WorkbookError
from lab.units import show_bytes, show_rate, show_seconds


def test_times_and_rates_are_read_as_tc_reads_them():
    assert [units.seconds(text) for text in ("500us", "0.2ms", "20ms", "1.5s")] == [5e-4, 2e-4, 0.02, 1.5]
    rates = [units.bytes_per_second(text) for text in ("800kbit", "200mbit", "1Gbit", "2.5gbit")]
    assert rates == [1e5, 25e6, 125e6, 312.5e6]


def test_other_texts_are_refused_with_an_example():
    for text in ("", "20", "ms", "-1ms", "1gbit", "1 ms", "nanms"):
        with pytest.raises(WorkbookError, match="is not a time; write one such as 2ms"):
            units.seconds(text)
    for text in ("", "100", "0mbit", "100mb", "-1gbit", "infgbit"):
        with pytest.raises(WorkbookError, match="is not a rate; write one such as 100mbit"):
            units.bytes_per_second(text)
    with pytest.raises(WorkbookError, match="'604801s' is more than a week; write a time such as 2ms"):
        units.seconds("604801s")


def test_values_are_shown_in_the_unit_that_suits_them_times_and_rates_with_four_digits():
    times = (0.07597, 1.25, 1234.5, 3.14e-5, 2.5e-10, 0.99996, 0.0)
    shown = ["75.97 ms", "1.250 s", "1,234 s", "31.40 us", "0.2500 ns", "1.000 s", "0 s"]
    assert [show_seconds(value) for value in times] == shown
    assert (show_bytes(774_900), show_bytes(3.3e6), show_bytes(12)) == ("774.9 kB", "3.3 MB", "12 bytes")
    assert (show_rate(8e-9 / 19.2), show_rate(0.0)) == ("19.20 Gbit/s", "too fast to measure")
