"""A picture in a notebook has a text that describes it."""

import io

import matplotlib.image
import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from matplotlib import pyplot as plt

from lab.notebook.picture import show, show_events
from lab.trace.gantt import Event

ALT = "Rank 0 computes for two milliseconds."


def one_bar() -> None:
    figure, axes = plt.subplots()
    axes.bar([0], [1])
    show(figure, alt=ALT)


@pytest.mark.parametrize("draw", [one_bar, lambda: show_events([Event("F0", "forward", 0, 2_000_000)], ALT)])
def test_a_picture_is_a_white_png_with_its_description(draw):
    InteractiveShell.instance()
    with capture_output() as shown:
        draw()
    (output,) = shown.outputs
    assert output.data["text/plain"] == ALT and output.metadata == {"image/png": {"alt": ALT}}
    pixels = matplotlib.image.imread(io.BytesIO(output.data["image/png"]))
    assert pixels[0, 0].tolist()[:3] == [1, 1, 1] and pixels.min() < 0.9
    assert not plt.get_fignums()
