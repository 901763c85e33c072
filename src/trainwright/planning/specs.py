"""The observer of this room: it compares a run's first steps with the plan."""

from __future__ import annotations

from trainwright.recipe.observer_spec import ObserverSpec

PLAN_WATCH = ObserverSpec(
    "A comparison of the first steps with the plan.", create="trainwright.planning.plan_watch:of_run"
)
