"""Runs that hang: noticed, explained by rank, phase and stack, and ended if the recipe asks for it."""
