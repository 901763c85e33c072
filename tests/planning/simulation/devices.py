"""Operations that mix devices, on simulated GPUs that compute; prints the error of each as JSON, or null.

python -m tests.planning.simulation.devices
"""

from __future__ import annotations

import json
from collections.abc import Callable

from tests.support.computing_gpus.__main__ import compute_on


def main() -> None:
    compute_on("2xT4")
    import torch

    here, host = torch.ones(3, 3, device="cuda"), torch.ones(3, 3)
    other = torch.ones(3, 3, device="cuda:1")
    mask, three = host.bool(), torch.arange(3)
    layer = torch.nn.Linear(3, 3)
    tried: dict[str, Callable[[], object]] = {
        "sum": lambda: here + host,
        "in-place sum": lambda: here.add_(host),
        "product": lambda: here @ host,
        "two GPUs": lambda: here * other,
        "a mask of the host": lambda: here.masked_fill(mask, 0.0),
        "a choice of the host": lambda: torch.where(mask, here, here),
        "one of a list": lambda: torch.cat([here, host]),
        "an embedding of the host": lambda: torch.nn.functional.embedding(three.cuda(), host),
        "a layer of the host": lambda: layer(here),
        "numbers drawn by the host": lambda: torch.rand(3, generator=torch.Generator(), device="cuda"),
        "an array": lambda: here.numpy(),
        "a number of the host": lambda: here * torch.tensor(2.0),
        "indices of the host": lambda: here[three],
        "copies": lambda: (here.copy_(host), host.copy_(here), other.copy_(here)),
        "pinned memory": lambda: host.pin_memory().is_pinned() or 1 / 0,
    }
    found = {}
    for name, operation in tried.items():
        try:
            operation()
            found[name] = None
        except (RuntimeError, TypeError) as error:
            found[name] = str(error)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
