"""The machine of a run: detected, described or measured."""
