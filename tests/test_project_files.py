"""LICENSE, CITATION.cff, CONTRIBUTING.md and CHANGELOG.md say what is true for this tree."""

import re
import tomllib

from tests.run_modes import ROOT, SCRIPTS

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def text_of(name: str) -> str:
    return (ROOT / name).read_text()


def test_the_license_is_the_one_that_the_package_and_the_citation_name():
    fields = dict(re.findall(r"^([a-z-]+): (.+)$", text_of("CITATION.cff"), re.MULTILINE))
    assert PROJECT["license"] == fields["license"] == "Apache-2.0"
    license_text = " ".join(text_of("LICENSE").split())
    assert license_text.startswith("Apache License Version 2.0, January 2004")
    assert [f" {n}. " in license_text for n in range(1, 10)] == [True] * 9
    assert "END OF TERMS AND CONDITIONS" in license_text


def test_the_citation_has_the_version_of_the_package():
    assert re.search(r"^version: (.+)$", text_of("CITATION.cff"), re.MULTILINE)[1] == PROJECT["version"]


def test_the_changelog_names_every_lesson():
    changelog = text_of("CHANGELOG.md")
    assert not {mode for mode in SCRIPTS if f"`{mode}`" not in changelog}


def test_how_to_add_a_lesson_has_ten_steps_and_names_what_exists():
    page = text_of("CONTRIBUTING.md")
    assert re.findall(r"^(\d+)\. ", page, re.MULTILINE) == [str(n) for n in range(1, 11)]
    targets = re.findall(r"^(\w+):.*## ", text_of("Makefile"), re.MULTILINE)
    commands = re.findall(r"`make ([a-z ]+)`", page)
    assert commands and {word for command in commands for word in command.split()} <= set(targets)
    paths = [name for name in re.findall(r"`([\w./]+)`", page) if name.endswith(("/", ".sh"))]
    assert paths and all((ROOT / path).exists() for path in paths)
    folders = {script.partition("/")[0] + "/" for script in SCRIPTS.values()}
    assert folders <= set(paths)
