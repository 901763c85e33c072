"""Algorithm Distillation: agents that learn in their context."""
