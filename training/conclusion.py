"""Say in about ten rows and two sentences what a run has shown, and what to run next.

The rows come from the report's figures (docs/report.md); a row appears only if the run has its figures. What
only one script can say, it gives to `Run.finish` itself, as `rows` and `meaning`. The command that comes next
is in the last column of the table in entrypoint.sh.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lab import units

Figures = dict[str, Any]
TABLE = Path(__file__).parent.parent / "entrypoint.sh"


def rows(figures: Figures, of_lesson: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return a short report: at most ten pairs of a name and a value."""
    found = {name: value for name, value in figures.items() if value is not None}
    f = {"bytes_sent": 0, "communication_seconds": 0.0} | found
    shown: dict[str, str] = {}
    if "first_loss" in f and "last_loss" in f:
        held_out = f"; {f['validation_loss']:.3f} on held-out data" if "validation_loss" in f else ""
        shown["loss"] = f"{f['first_loss']:.3f} at first, {f['last_loss']:.3f} at last{held_out}"
    if "step_seconds" in f:
        shown["step"] = _step(f)
    if f.get("compute_seconds"):
        shown["computing"] = f"{units.show_seconds(f['compute_seconds'])} of the step"
    if f["communication_seconds"] and f["world_size"] > 1:  # one rank calls collectives, which send nothing
        shares = f"{f['hidden_share']:.0%} of it hidden, {f['blocking_share']:.0%} blocking"
        shown["communication"] = f"{units.show_seconds(f['communication_seconds'])} of the step: {shares}"
        busy = f["compute_seconds"] + f["communication_seconds"] * (1 - f["hidden_share"])
        if (rest := f["step_seconds"] - busy) > 0.1 * f["step_seconds"]:
            shown["neither"] = f"{units.show_seconds(rest)} of the step"
    if "not_measured" in f:
        shown["not measured"] = f["not_measured"]
    if f["bytes_sent"]:
        shown["a rank sent"] = _sent(f)
    if "peak_memory_bytes" in f:
        shown["peak memory"] = units.show_bytes(f["peak_memory_bytes"])
    shown |= of_lesson
    if f["world_size"] > 1 and "replicas_equal" in f:
        shown["replicas"] = "bitwise equal on all ranks" if f["replicas_equal"] else "differ"
    return list(shown.items())


def _step(f: Figures) -> str:
    predicted = f.get("predicted_step_seconds", 0.0)
    is_near = abs(predicted / f["step_seconds"] - 1) <= 0.3  # else ranks share cores: see docs/report.md
    by_formula = f" (predicted {units.show_seconds(predicted)})" if is_near else ""
    what = "images" if "accuracy" in f or "validation_accuracy" in f else "tokens"
    used = f", MFU {f['mfu']:.0%}" if "mfu" in f else ""
    return (
        f"{units.show_seconds(f['step_seconds'])}{by_formula}, {f['tokens_per_second']:,.0f} {what}/s{used}"
    )


def _sent(f: Figures) -> str:
    messages = f["messages_sent"] / f["steps"]
    number = f"{messages:,.0f}" if messages >= 10 or messages.is_integer() else f"{messages:.1f}"
    size = units.show_bytes(f["bytes_sent"] / f["steps"])
    sent = f"{size} in {number} message{'s' * (number != '1')} a step"
    if not f.get("bytes_formula"):
        return sent
    counted, formula = ([f[f"bytes_{which}"], f[f"messages_{which}"]] for which in ("sent", "formula"))
    return sent + units.show_checked(counted, formula)


def sentences(figures: Figures, of_lesson: str | None) -> list[str]:
    """Return one sentence about what the figures mean, if they tell it, and one about what to run next."""
    mode, ranks = figures["run_mode"], figures["world_size"]
    if ranks == 1:
        return [f"One rank sends nothing: make run RUN_MODE={mode} WORLD_SIZE=2 divides the work."]
    return [said for said in (of_lesson or _meaning(figures), next_command(mode, ranks)) if said]


def next_command(mode: str, ranks: int) -> str | None:
    """Return what the table has in its last column, with this number of ranks."""
    found = re.search(rf"^{mode} .* \| (make \w+ )(.+)$", TABLE.read_text("utf-8"), re.MULTILINE)
    return found and found[1] + f"WORLD_SIZE={ranks} " * (ranks != 2) + found[2]


def _meaning(f: Figures) -> str | None:
    if (steps := f.get("sync_every", 1)) > 1:
        return (
            f"Each rank trains alone for {steps} steps, and drifts away from the others; the time and the "
            "bytes of a step are means over such a round, with its synchronisation."
        )
    if not (seconds := f.get("communication_seconds")):
        return None
    took = units.show_seconds(seconds)
    if f["blocking_share"] > 0.99:
        whole = f"All of the {took} of communication, {seconds / f['step_seconds']:.0%} of the step, blocks"
        return f"{whole}: the rank computes nothing meanwhile."
    rest = units.show_seconds(seconds * (1 - f["hidden_share"]))
    hidden = f"{f['hidden_share']:.0%} of the {took} of communication is hidden behind computing"
    return f"{hidden}; the other {rest} make the step longer."
