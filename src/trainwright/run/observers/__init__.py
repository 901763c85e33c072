"""Observers of the core: each gets every event of a run and shows it."""
