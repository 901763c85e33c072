"""Tokens: made from rows and texts, stored on disk, and divided into windows."""
