"""Tokenizers that need no download."""
