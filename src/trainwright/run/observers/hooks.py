"""The observers of a run: what the recipe turns on, and what is always on (``recipe/observer_spec.py``).

What observes events gets every event as it is written (``engine.events``), and `phase` events, on rank 0 and in the
training process: slow work belongs in a thread.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainwright.recipe.extensions import load
from trainwright.recipe.observer_spec import ObserverSpec, Settings
from trainwright.recipe.registries import ALWAYS_ON, OBSERVERS
from trainwright.utils.text import say

if TYPE_CHECKING:
    from trainwright.engine.events import Event, Observer, Record
    from trainwright.machine.machine import Gpu
    from trainwright.machine.usage import OwnProcess
    from trainwright.parallel.world import RankInfo
    from trainwright.recipe.schema import RecipeSchema
    from trainwright.utils.heartbeat import Heartbeat


@dataclass(frozen=True)
class ObservedRun:
    """A run, on its rank 0.

    Attributes:
        emit: records a further event.
        processes: of the run.
        own: the process of this rank.
        may_replan: whether the run may go on with another plan.
    """

    directory: Path
    recipe: RecipeSchema
    emit: Callable[[Event], None]
    processes: int
    own: OwnProcess
    may_replan: bool = False


@dataclass(frozen=True)
class ObservedRank:
    """A rank of the run in ``directory``, its heartbeat, and the GPU that it computes on."""

    directory: Path
    info: RankInfo
    heartbeat: Heartbeat
    gpu: Gpu | None


def build_observers(run: ObservedRun) -> list[Observer]:
    """Return what gets the events of a run; the console comes after the observers that have a key, so that its final
    output comes after they have finished.

    Raises:
        RequestError: an observer that the recipe names cannot be created.
    """
    observers: list[Observer] = []
    for name, setting in run.recipe.logging.observers.items():
        if setting is False:
            continue
        observer = OBSERVERS.get(name)
        if isinstance(observer, ObserverSpec):
            instance = _load_function(name, observer, "create")(run, setting)
        else:
            instance = observer(run.directory, **(setting if isinstance(setting, Mapping) else {}))
        if instance is not None:
            observers.append(_Guarded(name, instance))
    return [*observers, *filter(None, (create(run, True) for create in _iterate_always_on("create")))]


def observe_rank(rank: ObservedRank) -> ExitStack:
    """Return the context in which a rank trains."""
    stack = ExitStack()
    for enter in _iterate_always_on("beside"):
        stack.enter_context(enter(rank))
    return stack


def build_sampler(run: Path, processes: int) -> Callable[[], Sequence[Mapping[str, Any]]]:
    """Return a function that returns what the machines of a run's first ranks do now, as far as it is observed."""
    return next((sample(run, processes) for sample in _iterate_always_on("samples")), lambda: ())


def after_workers(run: Path, ranks: Iterable[int]) -> None:
    """Call this in the launcher when the ranks that it started have ended without failure."""
    for call in _iterate_always_on("after_workers"):
        call(run, ranks)


def after_failure(run: Path, settings: Settings, seconds: float, *, waits: bool) -> None:
    """Call this in the launcher when the run has failed, ``seconds`` after its launch; ``waits``: it may take long."""
    for name, setting in settings.items():
        if setting is not False and OBSERVERS.is_present(name):
            spec = OBSERVERS.get(name)
            if isinstance(spec, ObserverSpec) and spec.after_failure is not None:
                _load_function(name, spec, "after_failure")(run, setting, seconds, waits)


def _iterate_always_on(what: str) -> Iterator[Callable[..., Any]]:
    """Yield a function of each observer that is always on."""
    for name in ALWAYS_ON.names():
        if ALWAYS_ON.is_present(name) and getattr(spec := ALWAYS_ON.get(name), what) is not None:
            yield _load_function(name, spec, what)


def _load_function(name: str, spec: ObserverSpec, what: str) -> Callable[..., Any]:
    entry_point = getattr(spec, what)
    return load(entry_point, f"observer {name}: {entry_point}")


class _Guarded:
    """An observer whose errors do not end a run: after the first one it gets no more events."""

    def __init__(self, name: str, observer: Observer) -> None:
        self._name = name
        self._observer: Observer | None = observer

    def __call__(self, event: Record) -> None:
        if self._observer is None:
            return
        try:
            self._observer(event)
        except Exception as error:
            from trainwright.run.process import find_console

            self._observer = None
            reason = f"{type(error).__name__}: {error}"
            message = f"observer {self._name} failed at {event['event']} ({reason}); it receives no more events"
            say(message, file=find_console() or sys.stderr)


TENSORBOARD = ObserverSpec(
    "Curves for TensorBoard.",
    create="trainwright.run.observers.tensorboard:build_observer",
    default=True,
    library="tensorboard",
)
HUB = ObserverSpec(
    "Uploads of checkpoints that the section push asks for.", create="trainwright.run.hub:build_observer"
)
CONSOLE = ObserverSpec(
    "Progress and results on the console.", create="trainwright.run.observers.console:build_observer"
)
