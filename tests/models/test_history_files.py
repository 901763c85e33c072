"""Files of history models of anybody."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from trainwright.errors import RequestError
from trainwright.tasks.algorithm_distillation.model import (
    HistoryModel,
    HistoryShape,
    load_history_model,
    save_history_model,
)

SHAPE = HistoryShape((4, 4), 5, 16, 1, 2, "transition", "learned", steps=16, latents=2)


@pytest.fixture
def agent(tmp_path: Path) -> Path:
    weights = HistoryModel(SHAPE, seed=3).named_parameters()
    save_history_model(tmp_path / "agent", SHAPE, {"environment": {}, "tried": {}}, weights)
    return tmp_path / "agent"


def test_what_was_saved_is_loaded(agent: Path) -> None:
    loaded, expected = load_history_model(agent)[0], HistoryModel(SHAPE, seed=3)
    for name, parameter in expected.named_parameters():
        assert torch.equal(loaded.get_parameter(name), parameter)
        assert loaded.get_parameter(name).requires_grad


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "values",
    [{"layers": 10**9}, {"observations": [4] * 2_000_000}, {"width": 10**6, "heads": 1}, {"actions": 10**9}],
    ids=lambda values: next(iter(values)),
)
def test_sizes_that_the_weights_do_not_have_take_neither_memory_nor_time(agent: Path, values: dict[str, Any]) -> None:
    about = json.loads((agent / "agent.json").read_text())
    (agent / "agent.json").write_text(json.dumps({**about, "model": {**about["model"], **values}}))
    with pytest.raises(RequestError, match="is not a model of histories that can be read"):
        load_history_model(agent)


def test_weights_that_are_a_pipe_are_not_waited_for(agent: Path) -> None:
    (agent / "model.safetensors").unlink()
    os.mkfifo(agent / "model.safetensors")
    with pytest.raises(RequestError, match="not a regular file"):
        load_history_model(agent)
