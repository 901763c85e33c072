"""What a step allocates and computes, traced once from the run's own modules on tensors without data.

Its tests compare it with real steps. Plans still follow from ``planning/operations``.
"""
