"""Fault injection into real runs, and the properties that must hold nevertheless: ``trainwright drill``."""
