"""Faults that are put into real runs on purpose, and what has to hold all the same: ``trainwright drill``."""
