"""Strategies that distribute a model over devices."""
