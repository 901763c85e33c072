"""`zero1`, `zero2` and `zero3` on DeepSpeed."""
