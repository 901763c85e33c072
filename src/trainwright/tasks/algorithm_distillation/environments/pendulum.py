"""Gymnasium's pendulum with a hidden task: the angle to hold, which only the rewards show."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.envs.classic_control.pendulum import PendulumEnv, angle_normalize

_SCALE = np.pi**2  # of the largest cost of an angle, so that rewards are about -1 to 0


class TargetPendulum(PendulumEnv):
    """``Pendulum-v1`` that is to stand still at ``target`` (radians, 0 is upright) instead of upright.

    The reward of a step is -(d² + 0.1 w² + 0.001 u²) / pi², with the distance d to the target, the angular velocity w
    and the torque u. Gravity is so weak that the torque can hold every angle.
    """

    def __init__(self, target: float, g: float = 2.0) -> None:
        super().__init__(g=g)
        self.target = target

    def step(self, u: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Take a torque [1]; see ``gymnasium.Env.step``."""
        angle, velocity = self.state
        observation, _, terminated, truncated, information = super().step(u)
        cost = angle_normalize(angle - self.target) ** 2 + 0.1 * velocity**2 + 0.001 * self.last_u**2
        return observation, -float(cost) / _SCALE, terminated, truncated, information
