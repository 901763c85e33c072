"""Checks of NVIDIA GPUs."""
