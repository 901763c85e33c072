"""Models, adapters, quantization and weight files."""
