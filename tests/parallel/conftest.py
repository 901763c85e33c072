from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.support.runs import ON_ROWS, Runs
from tests.support.strategies import Singles, TrainedSingles


@pytest.fixture(scope="session")
def singles(runs: Runs) -> Singles:
    """Eight steps on one process, for whatever is spread over more to be compared with."""
    return TrainedSingles(runs, 8)


@pytest.fixture(scope="session")
def model_directories(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A trained model as it was exported; with the names that its base model has; with a tied weight in it twice."""
    exported = runs.trained(ON_ROWS, "train.max_steps=2", "parallel.num_processes=1") / "final"
    made = {"as it is": exported}
    for kind in ("renamed", "stored twice"):
        made[kind] = tmp_path_factory.mktemp("models") / "model"
        shutil.copytree(exported, made[kind])
        tensors = load_file(exported / "model.safetensors")
        if kind == "renamed":
            tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
        else:
            assert json.loads((exported / "config.json").read_text())["tie_word_embeddings"] is True
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
        save_file(tensors, made[kind] / "model.safetensors", metadata={"format": "pt"})
    return made


def from_directory(path: Path) -> tuple[str, ...]:
    """Overrides for a model with weights."""
    return (f"model.name={path}", "model.config=null", "model.tokenizer=null")
