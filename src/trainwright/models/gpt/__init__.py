"""Trainwright's own GPT."""
