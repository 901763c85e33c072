"""What was measured on a machine: calibrations, quick measurements, its own runs."""
