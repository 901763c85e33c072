"""The observers of the core: TensorBoard, uploads of checkpoints, and the console."""

from __future__ import annotations

from trainwright.recipe.observer_spec import ObserverSpec

TENSORBOARD = ObserverSpec(
    create="trainwright.run.observers.tensorboard:of_run", setting=bool, default=True, library="tensorboard"
)
HUB = ObserverSpec(create="trainwright.run.hub:of_run")  # asked for by the section push
CONSOLE = ObserverSpec(create="trainwright.run.observers.console:of_run")
