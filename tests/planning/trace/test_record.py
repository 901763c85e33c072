"""What a recorder counts of operations on tensors without data, against torch's profiler."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile

from trainwright.planning.trace.record import EMBEDDING, Recorder


class Recurrent(nn.Module):
    """A state that is updated token by token, from slices of all tokens' inputs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.ones(width))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        decay, state = inputs * self.gate, torch.zeros_like(inputs[:, 0])
        for token in range(inputs.shape[1]):
            state = decay[:, token] * state + inputs[:, token]
        return state.square().sum()


def test_gradients_of_one_tensor_are_added_in_place_as_by_autograd() -> None:
    shape = (2, 16, 4096)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        module, inputs = Recurrent(shape[-1]), torch.ones(shape)
        module(inputs).backward()
    found: Any = recorded.profiler
    events = sorted(found.kineto_results.events(), key=lambda event: event.start_ns())
    real = max(accumulate(event.nbytes() for event in events if event.name() == "[memory]"))
    with FakeTensorMode():
        module, inputs = Recurrent(shape[-1]), torch.ones(shape)
        recorder = Recorder(module, {module.gate: "gate"}, lambda *_: (), None)
        with recorder:
            recorder.begin(EMBEDDING, "forward")
            loss = module(inputs)
            recorder.begin(EMBEDDING, "backward")
            loss.backward()
        changes = [
            event.size if event.kind == "allocated" else -event.size
            for segment in recorder.segments
            for event in segment.events
        ]
    assert max(accumulate(changes)) + module.gate.nbytes == real
