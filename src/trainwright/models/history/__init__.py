"""Models of learning histories, for algorithm distillation."""
