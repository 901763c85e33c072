"""The training loop, its checkpoints, events and exports."""
