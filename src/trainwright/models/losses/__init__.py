"""Losses of a linear head that never hold all logits at once."""
