"""Windows of learning histories: the training examples of Algorithm Distillation.

A history of a learner (one goal, one stream) is a sequence of episodes. Subsampling every n-th episode turns it into n
histories that each learn n times as fast: one starts with episode 0, one with episode 1, and so on. The steps are
sorted into this order once, so that every window is a contiguous range. Windows start at episodes, and where contexts
start when the model acts, which is within an episode if episodes differ in length; windows shorter than an episode
start anywhere. If only their last step is a target, one window ends at every step.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trainwright.data.tokens.dataset import MixturePart
from trainwright.tasks.algorithm_distillation.histories import Histories, History
from trainwright.tasks.algorithm_distillation.model import HistoryShape, Steps
from trainwright.tasks.algorithm_distillation.objective import HistoryBatch

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Cut:
    """How histories are divided into windows.

    Attributes:
        subsample: keep every n-th episode.
        steps: steps of a context, or of a region of a compressed one.
        regions: regions per window of a compressed context; 1 without compression.
        last_only: whether only the last step of a window is a target.
        region_before: whether a window is a region and the previous one, which is absent at the start.
        shortest: of the windows that are truncated at the end of a history, all with at least this many steps are kept;
            of shorter ones only the longest, so that every step is in a window.
    """

    subsample: int
    steps: int
    regions: int
    last_only: bool
    region_before: bool
    shortest: int

    @classmethod
    def of(
        cls, shape: HistoryShape, *, subsample: int, trained_regions: int, last_only: bool, forgotten_at_once: int
    ) -> Cut:
        """Return the division for the contexts of a model.

        Args:
            forgotten_at_once: steps that a full context drops when the model acts. It then continues from the remaining
                context, so such contexts are trained too, wherever they start in a history.
        """
        regions = 2 if shape.regions == 2 else trained_regions if shape.latents else 1
        shortest = shape.steps - forgotten_at_once if regions == 1 else shape.steps * regions
        return cls(subsample, shape.steps, regions, last_only, shape.regions == 2, shortest)

    @property
    def moves_by(self) -> int:
        """Return the steps between the starts of successive contexts as the model acts; 0 if the start stays."""
        if self.regions == 1:
            return max(0, self.steps - self.shortest)
        return self.steps if self.region_before else 0

    @property
    def window(self) -> int:
        """Return the number of steps of the longest possible window."""
        return self.steps * self.regions


class HistoryWindows:
    """All windows of the histories of some goals; implements the dataset interface of streams.

    Args:
        histories: read goal by goal.
        goals: indices into ``histories.goals``.
    """

    mixture: tuple[MixturePart, ...] | None = None
    paired: None = None

    def __init__(self, histories: Histories, goals: Sequence[int], cut: Cut, shape: HistoryShape) -> None:
        self.cut = cut
        self._actions_count = shape.actions
        arrays = [_order_steps(histories.goal(goal), cut.subsample) for goal in goals]
        self._steps = {name: np.concatenate([part[name] for part in arrays]) for name in arrays[0]}
        begins, lengths, absent = _cut_windows(self._steps.pop("segment"), self._steps.pop("episode_start"), cut)
        self._begins, self._lengths, self._absent = begins, lengths, absent
        self.fingerprint = self._fingerprint()

    def __len__(self) -> int:
        return len(self._begins)

    @property
    def steps(self) -> int:
        """Return the number of steps of all histories."""
        return len(self._steps["actions"])

    @property
    def token_count(self) -> int:
        """Return the number of steps of all windows."""
        return int(self._lengths.sum())

    @property
    def longest(self) -> int:
        """Return the number of steps of the longest window, which is at most ``cut.window``."""
        return int(self._lengths.max())

    def sequences(self, index: int) -> tuple[int, ...]:
        """Return the single sequence of an example."""
        return (index,)

    def sequence_length(self, sequence: int) -> int:
        """Return the number of steps of one sequence."""
        return self.length(sequence)

    def length(self, index: int) -> int:
        """Return the number of steps of one window."""
        return int(self._lengths[index])

    def example_lengths(self) -> Array:
        """Return the number of steps of every window."""
        return self._lengths

    def target_count(self, index: int) -> int:
        """Return the number of predicted actions in one window."""
        return 1 if self.cut.last_only else self.length(index)

    def will_need(self, examples: Iterable[int]) -> None:
        """Do nothing: all data is in memory."""

    def describe(self, index: int) -> str:
        """Describe where a window starts, for messages."""
        return f"{self.length(index)} steps from step {int(self._begins[index])} of all histories"

    def batch(self, examples: Sequence[int]) -> HistoryBatch:
        """Return the tensors of windows, padded to the longest."""
        indices = np.asarray(examples)
        lengths, absent = self._lengths[indices], self._absent[indices]
        width = int((lengths + absent).max())
        # Absent regions are padding at the front.
        position = np.arange(width)[None] - absent[:, None]
        real = (position >= 0) & (position < lengths[:, None])
        index = self._begins[indices][:, None] + np.clip(position, 0, lengths[:, None] - 1)
        step_values = {name: values[index] for name, values in self._steps.items()}
        targets = real & (position == lengths[:, None] - 1) if self.cut.last_only else real
        return HistoryBatch(
            steps=self._build_seen_steps(step_values, position),
            actions=_convert_to_tensor(step_values["actions"], np.int64),
            rewards=_convert_to_tensor(step_values["rewards"], np.float32),
            next_states=_convert_to_tensor(step_values["next_states"], np.int64),
            real=torch.from_numpy(real),
            targets=torch.from_numpy(targets),
        )

    def _build_seen_steps(self, taken: dict[str, Array], position: Array) -> Steps:
        first = position <= 0
        before = {name: np.roll(taken[name], 1, axis=1) for name in ("actions", "rewards", "dones")}
        return Steps(
            states=_convert_to_tensor(taken["states"], np.int64),
            before_actions=_convert_to_tensor(
                np.where(first, self._actions_count, before["actions"].astype(np.int64)), np.int64
            ),
            before_rewards=_convert_to_tensor(np.where(first, 0.0, before["rewards"]), np.float32),
            before_dones=_convert_to_tensor(np.where(first, False, before["dones"]), np.bool_),
        )

    def _fingerprint(self) -> str:
        digest = hashlib.sha256(json.dumps(self.cut.__dict__, sort_keys=True).encode())
        for name in sorted(self._steps):
            digest.update(name.encode())
            digest.update(np.ascontiguousarray(self._steps[name]).data)
        return digest.hexdigest()[:32]


def _convert_to_tensor(values: Array, dtype: Any) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values.astype(dtype)))


def _order_steps(history: History, subsample: int) -> dict[str, Array]:
    """Return the steps of a goal's streams [streams * time], grouped by phase of every n-th episode, and the starts."""
    dones = history.dones.T
    starts = np.ones(dones.shape, bool)
    starts[:, 1:] = dones[:, :-1]
    phase = (np.cumsum(starts, axis=1) - 1) % subsample
    # A stable sort keeps the order of time within a phase.
    order = np.argsort(phase, axis=1, kind="stable")

    def in_order(values: Array) -> Array:
        """Reorder ``values`` [time, streams] or [time, streams, k] to [streams * time] or [streams * time, k]."""
        values = np.swapaxes(values, 0, 1)
        index = order[..., None] if values.ndim == 3 else order
        return np.take_along_axis(values, index, axis=1).reshape(-1, *values.shape[2:])

    phases = np.take_along_axis(phase, order, axis=1)
    begins = np.ones(dones.shape, bool)
    begins[:, 1:] = phases[:, 1:] != phases[:, :-1]
    arrays = {name: in_order(values) for name, values in history._asdict().items()}
    return {**arrays, "segment": begins.reshape(-1), "episode_start": in_order(starts.T)}


def _cut_windows(segment: Array, episode_start: Array, cut: Cut) -> tuple[Array, Array, Array]:
    """Return first step, length and absent steps before every window, from starts of histories and episodes."""
    edges = np.append(np.flatnonzero(segment), len(segment))
    if cut.last_only:
        return _cut_windows_to_every_step(edges, cut)
    starts = np.flatnonzero(episode_start | segment)
    if np.diff(starts, append=len(segment)).max() > cut.steps:
        # Contexts shorter than an episode start anywhere in it.
        starts = np.arange(len(segment))
    elif cut.moves_by:
        position = np.arange(len(segment)) - np.repeat(edges[:-1], np.diff(edges))
        starts = np.flatnonzero(episode_start | segment | (position % cut.moves_by == 0))
    of = np.searchsorted(edges, starts, side="right") - 1
    begin_of, end_of = edges[of], edges[of + 1]
    if cut.region_before:
        # `starts` are those of the later region; the previous one is complete, or the history starts here.
        offset = starts - begin_of
        usable = (offset == 0) | (offset >= cut.steps)
        absent = np.where(offset == 0, cut.steps, 0)[usable]
        begins = (starts - cut.steps)[usable] + absent
        return begins, np.minimum(end_of[usable] - begins, cut.window - absent), absent
    remaining = end_of - starts
    previous = np.roll(starts, 1)
    # Whether the previous window also reaches the end of the history.
    whole_before = (np.roll(of, 1) == of) & (end_of - previous <= cut.window)
    usable = ~whole_before | (remaining >= cut.shortest)
    usable[0] = True
    return starts[usable], np.minimum(remaining, cut.window)[usable], np.zeros(int(usable.sum()), np.int64)


def _cut_windows_to_every_step(edges: Array, cut: Cut) -> tuple[Array, Array, Array]:
    """Return, as ``_cut_windows``, the context of every predicted action, which ends with its step."""
    begin_of = np.repeat(edges[:-1], np.diff(edges))
    steps = np.arange(edges[-1])
    if cut.regions == 1:
        begins = np.maximum(begin_of, steps + 1 - cut.steps)
        return begins, steps + 1 - begins, np.zeros_like(begins)
    region = (steps - begin_of) // cut.steps
    begins = begin_of + np.maximum(region + 1 - cut.regions, 0) * cut.steps
    absent = np.where(region == 0, cut.steps, 0) if cut.region_before else np.zeros_like(begins)
    return begins, steps + 1 - begins, absent
