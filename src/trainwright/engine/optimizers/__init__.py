"""Optimizers: each as `optimizer_factory` of engine/optimizer.py makes it."""
