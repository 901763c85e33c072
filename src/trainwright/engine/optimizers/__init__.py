"""Optimizers: each as `build_optimizer_factory` of engine/optimizer.py makes it."""
