"""Training on simulated GPUs: the product's own code, from recipe to export, without computing anything.

Tensors are fake (shapes, dtypes and devices, no memory), the process group is fake (rank 0 of a world of any size), and
a compiled shim tells a CPU build of torch that there is a CUDA. A simulation has a process of its own, because the shim
must be loaded before torch.

`start.py` begins a simulation, loads the shim (`no_cuda.cpp`) and runs a worker, `device.py` and `mode.py` replace what
of torch would ask a driver, `recorders.py` notes memory, collectives and waits of the host, `report.py` has the result.
"""
