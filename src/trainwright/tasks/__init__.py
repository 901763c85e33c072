"""The tasks, one package each."""
