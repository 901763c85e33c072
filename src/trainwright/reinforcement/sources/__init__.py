"""Algorithms that learn while their histories are kept."""
