"""Checks that a recipe, a machine or a run is what it is taken for."""
