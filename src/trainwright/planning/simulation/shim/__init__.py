"""The compiled shim that tells a CPU build of torch that there is a CUDA."""
