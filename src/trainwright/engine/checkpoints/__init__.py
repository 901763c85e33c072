"""Checkpoints: written, verified, resumed, and exported."""
