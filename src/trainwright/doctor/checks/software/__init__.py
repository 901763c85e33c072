"""Checks of installed packages, compilers and kernels."""
