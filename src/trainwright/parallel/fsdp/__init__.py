"""`fsdp`: parameters, gradients and optimizer state sharded by torch's FSDP2."""
