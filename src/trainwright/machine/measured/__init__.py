"""Measurements of a machine: calibrations, quick measurements, its own runs."""
