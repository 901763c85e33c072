"""What recipes, plans and the engine need to know of an optimizer and of a schedule, without torch.

They are registered in ``recipe/registries.py``, by an entry point of the groups ``trainwright.optimizers`` and
``trainwright.schedules``, or named in a recipe as ``module:Name``.
"""

from __future__ import annotations

import importlib.metadata
import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import NamedTuple

from trainwright.errors import MachineError


@dataclass(frozen=True)
class Library:
    """A library that a value of a recipe needs.

    ``versions``: prefixes of the versions that work. ``users``: the values that need it, of ``key``.
    ``process_bytes``: what it adds to the resident memory of a process.
    """

    module: str
    title: str
    versions: tuple[str, ...]
    install: str
    users: str
    process_bytes: int = 0
    key: str = "parallel.strategy"

    @property
    def is_missing(self) -> bool:
        """Return whether the library is not installed."""
        return find_spec(self.module) is None

    def check(self) -> None:
        """Raise MachineError if it is not installed, or in a version that is not known to work."""
        try:
            version = importlib.metadata.version(self.module)
        except importlib.metadata.PackageNotFoundError:
            raise MachineError(
                f"{self.key}: {self.users} need {self.title}, which is not installed; {self.install}"
            ) from None
        if not f"{version}.".startswith(self.versions):
            raise MachineError(f"{self.key}: {self.title} {version} is not supported; {self.install}")


class StatePart(NamedTuple):
    """The part of a parameter whose state a rank has.

    ``shape``: of the whole parameter; ``rows``: of this rank, along its first dimension. ``momentum``: whether the
    recipe's momentum is more than 0. ``is_matrix``: whether it is a matrix of a block.
    """

    shape: tuple[int, ...]
    rows: int
    momentum: bool = True
    is_matrix: bool = False

    @property
    def numel(self) -> int:
        """The number of elements of this rank."""
        return self.rows * math.prod(self.shape[1:])


@dataclass(frozen=True)
class OptimizerSpec:
    """An optimizer.

    Attributes:
        summary: one line for the documentation of the key.
        implementation: place ``module:function`` of a function that gets the named parameters and the recipe's section
            ``optimizer``, and returns a ``torch.optim.Optimizer``. Its state per parameter is tensors of the
            parameter's shape, and numbers. The engine sets the learning rate of its groups before each step.
        reads: which of ``momentum``, ``nesterov``, ``betas``, ``eps`` and ``options`` of the section have an effect.
        state: elements of the optimizer's state for each element of a parameter, for the plan; or a function that
            returns the bytes of the state of a rank's ``part`` of a parameter, see `StatePart`.
        time: of an update relative to AdamW's of as many elements, for the plan: on a GPU by the bytes that its
            operations read and write, of which torch's fused AdamW has 28 an element.
        time_on_cpu: the same on a CPU, as measured on a core; None: ``time``.
        averages: whether the state has an ``average`` of each parameter, which is evaluated and exported in its place.
        library: a library that has to be installed.
        whole_matrices: whether the matrices of blocks are updated as a whole, from one element of state for each of
            theirs; strategies that shard parameters gather them.
        preconditions: whether the matrices of blocks are updated in the eigenbases of both sides
            (`list_preconditioned_sides`).
    """

    summary: str
    implementation: str
    reads: tuple[str, ...]
    state: int | Callable[[StatePart], int] = 2
    whole_matrices: bool = False
    preconditions: bool = False
    time: float = 1.0
    time_on_cpu: float | None = None
    averages: bool = False
    library: Library | None = None


@dataclass(frozen=True)
class ScheduleSpec:
    """A schedule of the learning rate after its warm-up.

    Attributes:
        factor: from the progress, 0 at the first step after the warm-up and 1 after the last step, to the part of the
            way from ``final_learning_rate_ratio`` (0.0) to the peak (1.0). It also gets what it ``reads`` as keywords.
        reads: which of ``power`` and ``cycles`` of the section, and of the numbers of steps ``warmup`` and ``total``.
        in_decay_steps: whether the progress is that of the last ``decay_steps``, before which the rate is at its peak.
        falls: whether the rate ever leaves its peak.
        on_plateau: whether the rate is reduced when the validation loss no longer falls, by ``plateau_factor`` and
            ``plateau_patience`` of the section.
    """

    factor: Callable[..., float]
    reads: tuple[str, ...] = ()
    in_decay_steps: bool = False
    falls: bool = True
    on_plateau: bool = False


ADAMW = OptimizerSpec(
    summary="adamw (Loshchilov and Hutter, arXiv 1711.05101)",
    implementation="trainwright.engine.optimizers.plain:adamw",
    reads=("betas", "eps"),
)
MUON = OptimizerSpec(
    summary="muon: orthogonalized momentum for the matrices of the blocks (Jordan et al., 2024; scaled as in arXiv "
    "2502.16982) and AdamW for all other parameters, with one learning rate",
    implementation="trainwright.engine.optimizers.muon:Muon",
    reads=("momentum", "betas", "eps"),
    whole_matrices=True,
)

# Of SOAP: the longest side of a matrix that has a preconditioner, and steps between refreshes of its basis.
LONGEST_SIDE, REFRESHED = 10_000, 10


def list_preconditioned_sides(shape: tuple[int, ...]) -> list[int]:
    """Return the lengths of the sides of a matrix that have a preconditioner."""
    return [side for side in shape if side <= LONGEST_SIDE]


def _count_bytes_with_bases(part: StatePart) -> int:
    squares = 2 * sum(side**2 for side in list_preconditioned_sides(part.shape)) if part.is_matrix else 0
    return 4 * (2 * part.numel + squares + 1)


SOAP = OptimizerSpec(
    summary="soap: adamw in the eigenbases of Shampoo's preconditioners for the matrices of the blocks (arXiv "
    "2409.11321), refreshed every 10 steps, and AdamW for all other parameters, with one learning rate; not with fsdp",
    implementation="trainwright.engine.optimizers.soap:Soap",
    reads=("betas", "eps"),
    state=_count_bytes_with_bases,
    preconditions=True,
)
SGD = OptimizerSpec(
    summary="sgd: gradient descent with momentum, as torch's SGD, whose weight decay is added to the gradient",
    implementation="trainwright.engine.optimizers.plain:sgd",
    reads=("momentum", "nesterov"),
    state=lambda part: 4 * part.numel * part.momentum,
    time=44 / 28,
    time_on_cpu=2.1,
)
LION = OptimizerSpec(
    summary="lion: the sign of an interpolated momentum (arXiv 2302.06675; published with betas [0.9, 0.99])",
    implementation="trainwright.engine.optimizers.plain:Lion",
    reads=("betas",),
    state=1,
    time=52 / 28,
    time_on_cpu=2.5,
)
RMSPROP = OptimizerSpec(
    summary="rmsprop: the gradient divided by the root of the mean of its squares (Tieleman and Hinton, 2012), as "
    "torch's RMSprop without momentum, whose weight decay is added to the gradient",
    implementation="trainwright.engine.optimizers.plain:rmsprop",
    reads=("eps",),
    state=1,
    time=52 / 28,
    time_on_cpu=4.0,
)

ADAGRAD = OptimizerSpec(
    summary="adagrad: the gradient divided by the root of the sum of its squares (Duchi et al., 2011), as torch's "
    "Adagrad, whose weight decay is added to the gradient",
    implementation="trainwright.engine.optimizers.plain:Adagrad",
    reads=("eps",),
    state=lambda part: 4 * part.numel,
    time=56 / 28,
    time_on_cpu=4.0,
)
ADEMAMIX = OptimizerSpec(
    summary="ademamix: adamw with a second momentum of decay 0.9999 and weight 5 (arXiv 2409.03137)",
    implementation="trainwright.engine.optimizers.plain:AdEMAMix",
    reads=("betas", "eps"),
    state=3,
    time=124 / 28,
    time_on_cpu=6.0,
)


def _count_factor_bytes(part: StatePart) -> int:
    if len(part.shape) < 2:
        return 4 * part.numel
    if len(part.shape) == 2:
        return 4 * (part.rows + part.shape[1])
    return 4 * (part.rows * math.prod(part.shape[1:-1]) + part.rows * math.prod((*part.shape[1:-2], part.shape[-1])))


ADAFACTOR = OptimizerSpec(
    summary="adafactor: second moments as means of rows and columns (arXiv 1804.04235), as in transformers with "
    "scale_parameter and relative_step off",
    implementation="trainwright.engine.optimizers.adafactor:Adafactor",
    reads=(),
    state=_count_factor_bytes,
    time=104 / 28,
    time_on_cpu=8.5,
)
SCHEDULE_FREE_ADAMW = OptimizerSpec(
    summary="schedule_free_adamw: AdamW that evaluates and exports an average of its iterates in place of a falling "
    "rate (arXiv 2405.15682); set schedule to constant",
    implementation="trainwright.engine.optimizers.plain:ScheduleFreeAdamW",
    reads=("betas", "eps"),
    state=3,
    time=112 / 28,
    time_on_cpu=6.0,
    averages=True,
)

# Of bitsandbytes: elements that share a scale, and those below which a parameter's state is fp32.
BLOCK, SMALLEST = 256, 4096
BITSANDBYTES = Library(
    module="bitsandbytes",
    title="bitsandbytes",
    versions=("0.5",),
    install="pip install 'bitsandbytes>=0.50'",
    users="optimizers with 8-bit states",
    key="optimizer.name",
)


def _build_8_bit_counter(states: int) -> Callable[[StatePart], int]:
    def size(part: StatePart) -> int:
        if math.prod(part.shape) < SMALLEST:
            return 4 * states * part.numel
        return states * (part.numel + 4 * -(-part.numel // BLOCK))

    return size


ADAMW_8BIT = OptimizerSpec(
    summary="adamw_8bit: adamw with states in 8 bits (arXiv 2110.02861; needs bitsandbytes)",
    implementation="trainwright.engine.optimizers.eight_bit:adamw",
    reads=("betas", "eps"),
    state=_build_8_bit_counter(2),
    time=16 / 28,
    time_on_cpu=35.0,
    library=BITSANDBYTES,
)
LION_8BIT = OptimizerSpec(
    summary="lion_8bit: lion with its state in 8 bits (needs bitsandbytes)",
    implementation="trainwright.engine.optimizers.eight_bit:lion",
    reads=("betas",),
    state=_build_8_bit_counter(1),
    time=14 / 28,
    time_on_cpu=20.0,
    library=BITSANDBYTES,
)

CONSTANT = ScheduleSpec(lambda progress: 1.0, falls=False)
LINEAR = ScheduleSpec(lambda progress: 1.0 - progress)
COSINE = ScheduleSpec(lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)))
WARMUP_STABLE_DECAY = ScheduleSpec(LINEAR.factor, in_decay_steps=True)
REDUCE_ON_PLATEAU = ScheduleSpec(CONSTANT.factor, on_plateau=True)
POLYNOMIAL = ScheduleSpec(lambda progress, power: (1.0 - progress) ** power, reads=("power",))
COSINE_RESTARTS = ScheduleSpec(lambda progress, cycles: COSINE.factor(progress * cycles % 1.0), reads=("cycles",))


def _inverse_sqrt(progress: float, warmup: int, total: int) -> float:
    step = warmup + progress * (total - warmup)
    return math.sqrt((warmup + 1) / (step + 1))


# Vaswani et al., arXiv 1706.03762, equation 3; here the first step after the warm-up has the peak.
INVERSE_SQRT = ScheduleSpec(_inverse_sqrt, reads=("warmup", "total"))


def check_optimizer(name: str) -> None:
    """Raise MachineError if a library that an optimizer needs is not installed, or in a version that does not work."""
    from trainwright.recipe.registries import OPTIMIZERS

    if (library := OPTIMIZERS.get(name).library) is not None:
        library.check()
