"""A notebook asks for a prediction before a run, and shows it beside the result."""

import pytest

from lab.notebook.prediction import Comparison, predict


def answers(*texts: str):
    rest = list(texts)
    return lambda prompt: rest.pop(0)


def test_the_reader_is_asked_until_a_number_is_typed(capsys):
    guess = predict("How large?", example=1.0, unit="MB", ask=answers("", "two", "1,024.5"))
    assert (guess.value, guess.unit) == (1024.5, "MB")
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "'' is not a number. Type one, such as 2 or 0.5.",
        "'two' is not a number. Type one, such as 2 or 0.5.",
    ]


def test_without_a_keyboard_the_example_is_taken_and_that_is_said(capsys):
    def closed(prompt: str) -> str:
        raise EOFError

    assert predict("How many?", example=3, unit="times", ask=closed).value == 3
    assert capsys.readouterr().out == "How many? 3 times (an example, because there is no keyboard)\n"


def test_other_errors_are_not_swallowed():
    def broken(prompt: str) -> str:
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        predict("How many?", example=3, ask=broken)


def test_prediction_and_result_stand_side_by_side():
    shown = predict("?", 0, "ms", ask=answers("1")).compare(2)
    assert repr(shown) == "predicted  1.000 ms\nmeasured   2.000 ms       2 times the prediction"
    assert "<td style='text-align:left'>2.000 ms</td>" in shown._repr_html_()
    assert Comparison(2, 2, "").verdict == "exactly as predicted"
    assert Comparison(100, 104, "").verdict == "as predicted, within 5 %"
    assert Comparison(0, 5, "").verdict == "the prediction was 0"
