"""Verifies a recipe on a machine with as much memory as a test says."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path


def on_a_machine_with(memory: int, recipe: str, overrides: Sequence[str], output: str) -> int:
    """What is shown, or the error, goes to the file ``output``. Returns 0 but where the sides part."""
    from trainwright.doctor.verify import verify
    from trainwright.errors import MachineError
    from trainwright.machine.detect import detect
    from trainwright.recipe.loading import load_recipe
    from trainwright.run.resolve import resolve

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)  # this is the launcher and no worker
    machine = replace(detect(), memory_bytes=memory, gpus=())
    with Path(output).open("w") as stream:
        try:
            recipe_here = resolve(load_recipe(Path(recipe), overrides), machine).recipe
            return int(not verify(recipe_here, machine, 2, stream).is_same)
        except MachineError as error:
            stream.write(str(error))
            return 0
