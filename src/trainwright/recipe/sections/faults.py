"""The section `faults` of a recipe."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from trainwright.recipe.sections.fields import Count, Restarts, Section, Time


class FaultsSection(Section):
    """What to do when something goes wrong while training."""

    restarts: Restarts = Field(
        "3 per hour",
        description="How often the run is restarted from its newest checkpoint if a process is killed, crashes, hangs "
        "(on_hang: restart) or loses its connection, or a node is lost and num_processes is a range: a number per hour "
        "or per day, or off. Errors of the recipe, the data or the numbers are not retried, and an error that repeats "
        "at the same step ends the run.",
    )
    on_hang: Literal["warn", "restart", "stop"] = Field(
        "warn",
        description="What to do if a process hangs: one that makes no progress for longer than its current phase has "
        "ever taken, and some seconds. The rank, the phase and the stack of every rank are printed. warn: wait on. "
        "restart: go on from the newest checkpoint, as often as faults.restarts allows. stop: end the run "
        "with exit code 5. Of several nodes, also for one that does not answer for 30 s.",
    )
    on_non_finite: Literal["stop", "skip", "rewind"] = Field(
        "stop",
        description="What to do if the loss or the gradient norm of a step is NaN or infinite. stop: end the run "
        "with exit code 4, with the weights of the step before. skip: skip the update of the step. rewind: go back to "
        "the newest checkpoint and leave the step's global batch out. Ten in a row end the run.",
    )
    mean_time_between: Time | None = Field(
        None,
        description="Mean time between failures that end the run, such as 6 h, for checkpoint.every: auto. The "
        "interval is the one that loses the least time to checkpoints and to steps that are repeated (Daly, 2006).",
    )
    replay_every: Count | None = Field(
        200,
        description="Number of steps between checks for silent corruption of memory and processors: a micro-batch of "
        "each rank is computed on another rank too, and copies of the weights are compared, to the bit. null: weights "
        "are only compared before evaluations, checkpoints and the end.",
    )
    on_corruption: Literal["rewind", "stop"] = Field(
        "rewind",
        description="What to do if replay_every finds something: go back to the newest checkpoint from before the last "
        "check that found nothing, or end the run with exit code 5. If it is found at the same step again, the run "
        "ends.",
    )
    on_loss_spike: Literal["stop", "skip", "rewind"] = Field(
        "skip",
        description="What to do if the loss of a step is a spike; train.skip_loss_spikes sets what counts as one. "
        "The values are those of on_non_finite. With skip, the loss counts as no spike any longer after ten in a row, "
        "and training goes on.",
    )
