"""Environments, learning algorithms, and histories of their learning. Importing this package alone imports no torch."""
