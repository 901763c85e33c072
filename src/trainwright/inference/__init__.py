"""A trained model in use: loaded from wherever it lies, asked in batches, scored, spread over devices."""
