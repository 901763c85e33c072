"""The kinds of faults: one function each, which injects the fault into a run and checks the outcome."""
