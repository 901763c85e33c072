"""Adapters: attach, read, save, and merge them into their base."""
