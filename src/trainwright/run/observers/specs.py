"""The observers of the core: TensorBoard, uploads of checkpoints, and the console."""

from __future__ import annotations

from trainwright.recipe.observer_spec import ObserverSpec

TENSORBOARD = ObserverSpec(
    "Curves for TensorBoard.",
    create="trainwright.run.observers.tensorboard:of_run",
    default=True,
    library="tensorboard",
)
HUB = ObserverSpec("Uploads of checkpoints that the section push asks for.", create="trainwright.run.hub:of_run")
CONSOLE = ObserverSpec("Progress and results on the console.", create="trainwright.run.observers.console:of_run")
