"""Environments, the algorithms that learn in them, and the histories of their learning. Imports no torch by itself."""
