"""Compatibility with other tools: Accelerate's and DeepSpeed's files, scripts that use Accelerate, GGUF."""
