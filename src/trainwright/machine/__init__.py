"""The machine that a run is on: detected, described or measured."""
