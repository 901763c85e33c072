"""GGUF files: read, and written."""
