"""Checks of the limits, cores and disks of the system."""
