"""Metrics of answers, one module per kind; the names are in registry.py."""
