"""The recipe: its schema, YAML files, includes and overrides. Imports no torch."""
