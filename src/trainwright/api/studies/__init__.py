"""Series of runs that are compared: ablations, and studies of unlearning."""
