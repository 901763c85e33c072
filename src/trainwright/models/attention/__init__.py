"""Attention: the kernels and their limits, the choice among them, and their use on packs of sequences."""
