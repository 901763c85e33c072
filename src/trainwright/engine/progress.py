"""The progress of a run: everything a checkpoint holds that is not a tensor."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trainwright.engine.loss_watch import Losses, Noise

EVALUATION, GENERATION = "evaluation", "generation"


@dataclass
class Progress:
    """The progress of a run: everything a checkpoint holds that is not a tensor."""

    step: int = 0  # also the position in the stream
    tokens: int = 0
    target_tokens: int = 0
    best_loss: float | None = None
    best_step: int | None = None
    loss_scale: float = 1.0  # fp16 only: factor on the loss so that small gradients do not vanish
    steps_at_scale: int = 0
    losses: Losses = field(default_factory=Losses)  # for train.skip_loss_spikes
    noise: Noise = field(default_factory=Noise)  # for train.gradient_noise_scale
    pending: str | None = None  # what a stop interrupted after the step: EVALUATION, or GENERATION alone

    @classmethod
    def of(cls, saved: dict[str, Any]) -> Progress:
        """Build from the content of a checkpoint. Raises ValueError if it is invalid."""
        saved = dict(saved)
        try:
            losses, noise = Losses(**saved.pop("losses", {})), Noise(**saved.pop("noise", {}))
            found = cls(**saved, losses=losses, noise=noise)
        except TypeError as error:
            raise ValueError(str(error)) from error
        for values in (found, losses, noise):
            for name, value in vars(values).items():
                if name != "pending" and not isinstance(value, (int, float, Losses, Noise, type(None))):
                    raise ValueError(f"{name} is no number")
        if not isinstance(found.step, int) or found.step < 0:
            raise ValueError(f"its step is {found.step}")
        return found
