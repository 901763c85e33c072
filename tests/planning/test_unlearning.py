"""Plans of unlearning: what is trained, what runs beside the model, and what is no longer run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trainwright.machine.describe import parse_machine
from trainwright.planning.candidates import Constraints
from trainwright.planning.facts import build_facts
from trainwright.planning.memory.peak import Memory, estimate_memory
from trainwright.planning.plan import make_plan
from trainwright.planning.step_time.rates import Rates
from trainwright.planning.step_time.step import estimate_step_time
from trainwright.planning.workload import Choice, Workload
from trainwright.recipe.schema import RecipeSchema

HIDDEN, INTERMEDIATE, LAYERS, VOCABULARY = 64, 128, 4, 259
DOWN = r"model\.layers\.(0|1)\.mlp\.down_proj\.weight"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINWRIGHT_CACHE", str(tmp_path / "cache"))


def workload(tmp_path: Path, adapter: str = "none", trainable: list[str] | None = None, **unlearn: Any) -> Workload:
    for name in ("forget", "retain"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": f"{name} " + "a" * 74}) + "\n")
    config = {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "tie_word_embeddings": True,
    }
    recipe = RecipeSchema.model_validate(
        {
            "task": "unlearn",
            "model": {"config": config, "tokenizer": "bytes", "adapter": adapter, "trainable": trainable},
            "data": {**{name: str(tmp_path / f"{name}.jsonl") for name in ("forget", "retain")}, "max_length": 128},
            "train": {"max_steps": 5, "global_batch_size": 4},
            "unlearn": unlearn,
        }
    )
    return build_facts(recipe).workload


def memory(found: Workload, strategy: str = "single", processes: int = 1) -> Memory:
    choice = Choice(strategy, processes, 1, 4, "no")  # type: ignore[arg-type]
    return estimate_memory(found, choice, parse_machine("2xH100"))


def test_an_example_is_a_forget_row_and_a_retain_row(tmp_path: Path) -> None:
    alone = workload(tmp_path, objective="grad_ascent").row_tokens
    assert workload(tmp_path, objective="grad_diff").row_tokens == 2 * alone


def test_what_is_asked_once_takes_no_memory_and_no_time(tmp_path: Path) -> None:
    assert workload(tmp_path, objective="npo").model.reference == "none"


@pytest.mark.slow
def test_a_reference_beside_the_model_is_held_as_the_model_is(tmp_path: Path) -> None:
    found = workload(tmp_path, objective="npo", retain_loss="kl")
    whole = memory(found)
    assert whole.parts["reference"] == whole.parts["parameters"]
    sharded = memory(found, "fsdp", 2)
    assert whole.parts["reference"] / 2 <= sharded.parts["reference"] < 0.6 * whole.parts["reference"]
    adapted = workload(tmp_path, adapter="lora", objective="npo", retain_loss="kl")
    assert "reference" not in memory(adapted).parts
    assert adapted.model.reference == "switched_off"


def test_only_what_is_trained_has_optimizer_state_and_gradients(tmp_path: Path) -> None:
    every = memory(workload(tmp_path, objective="rmu", layer=1)).parts
    two = memory(workload(tmp_path, objective="rmu", layer=1, trainable=[DOWN])).parts
    trained = 2 * HIDDEN * INTERMEDIATE
    assert two["optimizer state"] == 4 * (2 * trained + 2)
    assert (
        two["optimizer state"]
        < every["optimizer state"]
        < 8 * LAYERS * 4 * HIDDEN * (HIDDEN + INTERMEDIATE) + 8 * (VOCABULARY * HIDDEN)
    )
    assert two["parameters"] == every["parameters"]


def test_blocks_after_the_layer_of_rmu_take_no_time(tmp_path: Path) -> None:
    choice, cluster = Choice("single", 1, 1, 4, "no"), parse_machine("1xH100")
    rates = Rates(cluster)
    early, late = (
        estimate_step_time(workload(tmp_path, objective="rmu", layer=layer), choice, cluster, rates) for layer in (0, 3)
    )
    assert early.parts["matrix products"] == pytest.approx(late.parts["matrix products"] / 4)
    assert early.operations < late.operations / 2


def test_a_plan_says_in_json_what_is_trained(tmp_path: Path) -> None:
    found = workload(tmp_path, objective="rmu", layer=1, trainable=[DOWN])
    said = json.loads(json.dumps(make_plan(Constraints({}), found, parse_machine("1xH100")).as_json()))
    assert said["workload"]["model"]["trainable"] == [DOWN]
