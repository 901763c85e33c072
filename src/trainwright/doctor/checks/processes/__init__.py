"""Checks that run two processes together, and what they share."""
