"""Matrices whose update needs all of their elements: which rank computes it, and how the others get it."""
