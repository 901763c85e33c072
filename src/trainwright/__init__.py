"""Trainwright: a recipe and some machines in, a finished and checked training run out."""

__version__ = "0.1.0"
