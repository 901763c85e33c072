"""Rows of data: their layouts, and how each becomes a conversation or a text."""
