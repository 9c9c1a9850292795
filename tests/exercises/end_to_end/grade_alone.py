"""Let pytest grade exercises one by one, by their markers, and write what it reports into a file.

    python -m tests.exercises.end_to_end.grade_alone FILE EXERCISE...

One process for all of them saves what each process needs to import torch.
"""

import json
import sys
from pathlib import Path

import pytest


def main(file: str, *names: str) -> None:
    report, outcomes = Path(file).with_name("report.json"), []
    for name in names:
        report.unlink(missing_ok=True)
        code = pytest.main(["exercises", "-m", name, "--exercise-report", str(report)])
        graded = json.loads(report.read_text())["exercises"]
        outcomes.append({"name": name, "exit_code": int(code), "exercises": graded})
    Path(file).write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main(*sys.argv[1:])
