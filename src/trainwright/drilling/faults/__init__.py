"""The kinds of faults: a function each, which puts the fault into a run and says what has to come of it."""
