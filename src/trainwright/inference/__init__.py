"""Inference with trained models: finding, loading, answering and scoring, on any number of devices."""
