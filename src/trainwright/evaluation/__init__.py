"""How good a model is on given rows: likelihoods and written answers, with intervals, and two models side by side."""
