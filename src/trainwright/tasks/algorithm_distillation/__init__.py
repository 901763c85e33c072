"""Algorithm Distillation: agents that learn in context."""
