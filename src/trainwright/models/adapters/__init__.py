"""Adapters: attached, read, saved, and merged into their base."""
