"""Build the strategy that a recipe names."""

from __future__ import annotations

from trainwright.errors import RequestError
from trainwright.extensions import load
from trainwright.parallel.strategy import Setup, Strategy
from trainwright.recipe.strategy_spec import spec_of
from trainwright.registries import STRATEGIES

_METHODS = tuple(name for name, member in vars(Strategy).items() if callable(member) and not name.startswith("_"))


def build_strategy(setup: Setup) -> Strategy:
    """Distribute the model over the ranks.

    Raises:
        RequestError: keys of the recipe's section do not fit the model or the world size, or a strategy of another
            package cannot be imported or lacks a method.
        MachineError: the strategy needs a library that is not installed.
    """
    on_meta = any(parameter.is_meta for parameter in setup.module.parameters())
    assert setup.weights is not None or not on_meta, "nothing would fill the weights"
    name = setup.parallel.strategy
    place, described = spec_of(name).implementation, STRATEGIES.describe(name)
    implementation = load(place, f"{described}: its implementation {place}")
    if missing := [method for method in _METHODS if not hasattr(implementation, method)]:
        raise RequestError(f"{described}: its implementation {place} lacks {', '.join(missing)}")
    strategy: Strategy = implementation(setup)
    return strategy
