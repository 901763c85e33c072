"""`single` and `ddp`: every rank holds the full model."""
