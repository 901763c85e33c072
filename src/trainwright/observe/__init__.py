"""The display of a run, which only reads the run's events."""
