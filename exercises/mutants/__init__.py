"""This package holds wrong implementations that people have really shipped, each in its own file.

The docstring of a file says the symptom that a user would see. TARGET is the function or class that the
mutant replaces, KILLER is a test without arguments that must fail with it, and `mutant` is the wrong
implementation. If the killer may fail with another error than an AssertionError, FAILS_WITH is a part of that
error's text, or a tuple of texts of which the error must contain one. CAUSE is a part of the likely cause
that the checker of exercises must name (exercises/causes.py), or a tuple of parts of which it must name one,
where a race decides what goes wrong. Only the kinds of WITHOUT_A_CAUSE may lack it.
SYMPTOM is what a user sees, where the docstring tells the cause with it: the mutants of techniques are
exercises too (exercises/find_the_bug.py). tests/test_mutants.py runs all mutants.

A mutant must not call its own TARGET: while the mutant is in place, that name is the mutant.
"""

# Some kinds of mutants need no CAUSE. Each kind is the beginning of TARGET, with the reason.
WITHOUT_A_CAUSE = {
    "lab.": "It is equipment: a wrong report or setting shows in a test of that report or setting only.",
    "comm.rendezvous.keep_from_preempting": "It is equipment: gloo's threads change the time, and no result.",
    "comm.transport.": "It is equipment: what goes wrong on the way of bytes depends on the machine and its "
    "devices, and the tensors do not tell it.",
    "hybrid_parallel.planner.machine.": "A formula of the planner: the test's name says which case is wrong.",
    "hybrid_parallel.planner.memory_model.layer_activations": "A formula of the planner: the test's name "
    "says which term is wrong.",
}
