"""Learning algorithms that record their histories."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from trainwright.tasks.algorithm_distillation.environments import Environment
    from trainwright.tasks.algorithm_distillation.histories import Recording

# Keys of a source that are not settings of its algorithm.
_COMMON = ("name", "streams", "steps", "seed")


class Learners(Protocol):
    """Learners of several goals."""

    def learn(self, steps: int, progress: Callable[[float], None] | None = None) -> Recording:
        """Act and learn for ``steps`` steps of every stream; ``progress`` is called with the finished fraction."""
        ...


def learners(environment: Environment, tasks: torch.Tensor, seeds: torch.Tensor, source: Mapping[str, Any]) -> Learners:
    """Return new learners of ``tasks`` ``[goals, p]``, seeded by ``seeds`` int64 ``[goals]``.

    Args:
        source: ``name`` (ppo, q-learning or ucb), ``streams``, and the algorithm's settings.
    """
    from trainwright.tasks.algorithm_distillation.section import PpoSection, QLearningSection, UcbSection
    from trainwright.tasks.algorithm_distillation.sources.ppo import Ppo
    from trainwright.tasks.algorithm_distillation.sources.tables import Tables

    own = {key: value for key, value in source.items() if key not in _COMMON}
    if source["name"] == "ppo":
        return Ppo(environment, tasks, seeds, source["streams"], PpoSection(**own))
    settings = QLearningSection(**own) if source["name"] == "q-learning" else UcbSection(**own)
    return Tables(environment, tasks, seeds, source["streams"], settings)
