"""The built-in GPT."""
