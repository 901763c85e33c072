"""Rows of data: their layouts, and the conversion of each to a conversation or a text."""
