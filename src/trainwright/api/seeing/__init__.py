"""Runs to look at: listed, reported and compared."""
