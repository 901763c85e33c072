"""What a step allocates and computes, traced once from the run's own modules on tensors without data."""
