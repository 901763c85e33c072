"""Evaluation on given rows: likelihoods and generated answers, with intervals, and comparison of two models."""
