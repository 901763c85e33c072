"""Tokens: made from rows and texts, kept on disk, and cut into windows."""
