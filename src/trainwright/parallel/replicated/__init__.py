"""`single` and `ddp`: every rank holds the whole model."""
