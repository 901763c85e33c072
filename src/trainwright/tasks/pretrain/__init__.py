"""Pretraining on a corpus of text."""
