"""What a step allocates and computes, traced once from the run's own modules on tensors without data.

Memory (``planning/memory``) and time (``planning/step_time``) follow from it; its tests compare it with real steps.
"""
