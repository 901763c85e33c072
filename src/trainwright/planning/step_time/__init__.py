"""The predicted time of an optimizer step, and the rates it is computed from."""
