"""What a run shows: everything here reads the run's events and nothing else."""
