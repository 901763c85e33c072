"""Find out why a run failed, and whether this machine is fit for training."""
