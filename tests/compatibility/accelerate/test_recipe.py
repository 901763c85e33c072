"""A recipe and a file put together."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.compatibility.accelerate import files
from tests.compatibility.accelerate.files import translation, written
from trainwright.compatibility.accelerate.launcher import find_translation
from trainwright.errors import MachineError, RequestError
from trainwright.recipe.loading import load_recipe
from trainwright.recipe.schema import RecipeSchema

RECIPE = """task: sft
model: {name: some/model}
data: {train: rows.jsonl}
train: {global_batch_size: 16}
"""


def recipe(directory: Path, more: str = "") -> Path:
    path = directory / "recipe.yaml"
    path.write_text(RECIPE + more)
    return path


def joined(directory: Path, text: str, more: str = "", *overrides: str, resumed: bool = False) -> RecipeSchema:
    path = recipe(directory, more)
    ours, _ = translation(directory, text).over(path, overrides, resumed=resumed)
    return load_recipe(path, ours)


def test_file_fills_what_the_recipe_leaves_open(tmp_path: Path) -> None:
    loaded = joined(tmp_path, files.FSDP_2, "parallel: {strategy: auto}\n")
    assert (loaded.parallel.strategy, loaded.parallel.num_processes) == ("fsdp", 4)
    assert loaded.parallel.wrap == ["LlamaDecoderLayer", "Embedding"]
    assert loaded.parallel.reshard_after_forward is False
    assert (loaded.train.mixed_precision, loaded.train.activation_checkpointing) == ("no", "full")


def test_every_setting_of_every_file_is_a_key_of_the_recipe(tmp_path: Path) -> None:
    for text in (files.LOOSE_DDP, files.FSDP_1, files.TWO_NODES, files.INLINE_ZERO, files.TWO_CPU):
        loaded = joined(tmp_path, text).model_dump()
        for key, setting in translation(tmp_path, text).settings.items():
            section, name = key.split(".")
            assert loaded[section][name] == setting.value


def test_file_wins_over_the_recipe_and_says_so(tmp_path: Path) -> None:
    path = recipe(tmp_path, "parallel: {num_processes: 8, strategy: ddp}\n")
    overrides, reasons = translation(tmp_path, files.TWO_CPU).over(path, ())
    assert load_recipe(path, overrides).parallel.num_processes == 2
    assert len(reasons) == 1
    assert "recipe.yaml:5: parallel.num_processes is 8, replaced by 2" in reasons[0]


def test_strategies_that_contradict_are_refused_naming_both(tmp_path: Path) -> None:
    with pytest.raises(RequestError) as refused:
        joined(tmp_path, files.FSDP_2, "parallel: {strategy: ddp}\n")
    assert "recipe.yaml:5: parallel.strategy is ddp" in str(refused.value)
    assert "accelerate.yaml:1: distributed_type: FSDP means fsdp" in str(refused.value)


def test_command_line_wins_over_both(tmp_path: Path) -> None:
    loaded = joined(
        tmp_path, files.FSDP_2, "", "parallel.strategy=ddp", "parallel.num_processes=3", "train.mixed_precision=bf16"
    )
    assert (loaded.parallel.strategy, loaded.parallel.num_processes) == ("ddp", 3)
    assert loaded.train.mixed_precision == "bf16"
    assert loaded.parallel.wrap == "auto" and loaded.parallel.reshard_after_forward is True


def test_resumed_run_takes_the_files_strategy(tmp_path: Path) -> None:
    assert joined(tmp_path, files.FSDP_2, "parallel: {strategy: ddp}\n", resumed=True).parallel.strategy == "fsdp"


def test_file_that_cannot_be_honoured_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="fp8"):
        joined(tmp_path, "distributed_type: NO\nmixed_precision: fp8\n")


@pytest.mark.usefixtures("two_cores")
def test_what_a_file_means_here_hides_gpus_and_checks_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    found = find_translation(written(tmp_path, files.TWO_CPU), ["recipe.yaml", "parallel.num_processes=3"])
    assert (found.nodes, found.processes) == (1, 3)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    with pytest.raises(MachineError, match="possible here"):
        find_translation(written(tmp_path, files.LOOSE_DDP), [])
    with pytest.raises(RequestError, match="main_process_ip"):
        find_translation(written(tmp_path, files.TWO_NODES.replace("main_process_ip", "# ")), [])
    with pytest.raises(MachineError, match="4 GPUs on this machine"):
        find_translation(written(tmp_path, files.TWO_NODES), [], rendezvous="host:1")


def test_a_file_that_contradicts_the_recipe_is_named_with_its_line_and_the_recipes(tmp_path: Path) -> None:
    more = "  micro_batch_size: 4\n"
    path = recipe(tmp_path)
    path.write_text(RECIPE.replace("train: {global_batch_size: 16}", "train:\n  global_batch_size: 16\n" + more))
    overrides, _ = translation(tmp_path, files.INLINE_ZERO).over(path, ())
    with pytest.raises(RequestError) as refused:
        load_recipe(path, overrides)
    said = str(refused.value)
    assert f"{tmp_path}/accelerate.yaml:7: gradient_accumulation_steps: 4: train.gradient_accumulation_steps" in said
    assert f"train.global_batch_size: {path}:5, train.micro_batch_size: {path}:6" in said


def test_a_value_that_no_key_takes_is_named_with_its_line(tmp_path: Path) -> None:
    text = files.INLINE_ZERO.replace("gradient_clipping: 0.5", "gradient_clipping: -1")
    with pytest.raises(RequestError, match=r"accelerate.yaml:8: gradient_clipping: -1: optimizer.max_grad_norm: "):
        joined(tmp_path, text)
