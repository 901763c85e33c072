"""Checks of ports, interfaces and the variables of NCCL."""
