"""Make the three hints of an exercise that asks to find a bug, each of which tells more than the one before.

The first says what should be so, the second what goes wrong, and the third where to look.
"""

import ast
import difflib

Definition = ast.FunctionDef | ast.ClassDef
_POSSESSIVES = (
    "torchs",
    "optimizers",
    "gpus",
    "rank 0s",
    "one ranks",
    "a ranks",
    "other ranks",
    "every weights",
)


def hints_of(test: str, doc: str, symptom: str, right: Definition, wrong: Definition) -> tuple[str, str, str]:
    """Return the hints. `test` is the name of the test that fails, and `doc` says what the mistake does."""
    what = f"What happens: {doc}"
    if doc.rstrip(".") == symptom.rstrip("."):  # which the learner knows
        what = _calls(right) or what
    return f"It should be so: {_in_words(test)}. {_question(wrong)}", what, _where(right, wrong)


def _in_words(test: str) -> str:
    words = test.removeprefix("test_").replace("_", " ")
    for possessive in _POSSESSIVES:
        words = words.replace(f"{possessive} ", f"{possessive[:-1]}'s ")
    return words


def _question(wrong: Definition) -> str:
    if isinstance(wrong, ast.ClassDef):
        return "Which of the file's methods is responsible for that?"
    if lines_of(wrong) == ["pass"]:
        return "The body does nothing. What has to happen here?"
    if len(lines_of(wrong)) == 1:
        return "Is the one line of the body right, and is it all that this takes?"
    return "Which line is responsible for that, or is it missing?"


def _calls(right: Definition) -> str:
    """Return which functions the lesson's function calls: a short mistake leaves some of them out."""
    named = [ast.unparse(node.func) for node in ast.walk(right) if isinstance(node, ast.Call)]
    calls = [name for name in dict.fromkeys(named) if name.replace(".", "").replace("_", "").isalnum()]
    return f"The lesson's function calls {', '.join(f'`{name}`' for name in calls[:4])}." if calls else ""


def _where(right: Definition, wrong: Definition) -> str:
    """Return the third hint: the first line that differs, or after which something is missing."""
    if isinstance(wrong, ast.ClassDef):
        methods = ", ".join(f"`{node.name}`" for node in wrong.body if isinstance(node, ast.FunctionDef))
        return (
            f"The class that it inherits from is right. The mistake is in what the file changes: {methods}."
        )
    before, after = lines_of(right), lines_of(wrong)
    if len(after) == 1:
        promise = "the docstring, sentence by sentence" if ast.get_docstring(right) else "the function's name"
        return f"The body is only `{after[0]}`. Compare it with {promise}: what does it leave out or change?"
    for kind, _, _, start, _ in difflib.SequenceMatcher(None, before, after).get_opcodes():
        if kind in ("replace", "insert"):
            return f"Look at this line, and at what follows from it: `{after[start].strip()}`"
        if kind == "delete" and start == 0:
            return f"Something is missing before this line: `{after[0].strip()}`"
        if kind == "delete":
            return f"Something is missing after this line: `{after[start - 1].strip()}`"
    return "The lines are the lesson's. What stands around the function, such as a decorator, is missing."


def lines_of(function: Definition) -> list[str]:
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    statements = [node for node in body if not isinstance(node, ast.Import | ast.ImportFrom)]
    return [line for node in statements for line in ast.unparse(node).splitlines()]
