"""A CUDA device that is not there: what of torch asks a driver, a library or another process is replaced."""
