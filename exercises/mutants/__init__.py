"""Wrong implementations that people have really shipped, each in a file of its own.

A file says the symptom (its docstring), what it replaces (TARGET), the test that notices it (KILLER, a test
without arguments) and the implementation itself (`mutant`). Where the killer does not end with a failed
assertion, FAILS_WITH is part of the error's text. tests/test_mutants.py runs them all.

A mutant may call what its target calls, but not the target: that name leads back to the mutant.
"""
