"""Runs that are stored in a place for copies."""
