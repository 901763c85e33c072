"""The live page of runs: ``trainwright watch``."""
