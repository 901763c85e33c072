"""Checks of recipes, machines and runs."""
