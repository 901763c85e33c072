"""Fused kernels of training, written in Triton: the loss, norms, rotary positions, gated activations."""
