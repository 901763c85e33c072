"""New files: what is in them, and what becomes of the one that is there."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from tests.compatibility.accelerate.files import CPU, gpus, values
from trainwright.compatibility.accelerate.machine import list_lacking
from trainwright.compatibility.accelerate.translation import read_translation
from trainwright.compatibility.accelerate.writing import Answers, build_values, suggest_answers, write
from trainwright.errors import RequestError

FOUR = replace(suggest_answers(gpus(4)), processes=4)
EVERY = [
    suggest_answers(CPU),
    replace(suggest_answers(CPU), processes=1),
    replace(suggest_answers(CPU), strategy="fsdp"),
    replace(suggest_answers(CPU), strategy="zero1"),
    suggest_answers(gpus(1)),
    FOUR,
    replace(FOUR, strategy="fsdp"),
    replace(FOUR, strategy="fsdp", offload=True),
    replace(FOUR, strategy="zero2", offload=True),
    replace(FOUR, strategy="zero3"),
    replace(FOUR, strategy="zero2", accumulation=4, max_grad_norm=0.5),
    replace(FOUR, strategy="fsdp", compiled=True, reshard=False, wrap="Block,Embedding", recompute=True),
    replace(FOUR, gpu_ids="1,2,3,0"),
    replace(FOUR, strategy="zero3", offload=True, precision="fp16"),
    replace(FOUR, machines=2, machine_rank=1, main_ip="host", main_port=29500, processes=8),
]


@pytest.mark.parametrize("answers", EVERY)
@pytest.mark.parametrize("name", ["file.yaml", "file.json"])
def test_written_files_mean_what_was_answered(tmp_path: Path, answers: Answers, name: str) -> None:
    path = tmp_path / "new" / name
    assert write(path, build_values(answers), replace=False) is None
    found = read_translation(path)
    assert found.problems == ()
    assert found.processes == answers.processes and found.nodes == answers.machines
    assert found.strategy == ("single" if answers.processes == 1 else answers.strategy)
    assert found.value("train.mixed_precision") == answers.precision
    lines = list_lacking(found, CPU if answers.device == "cpu" else gpus(4))
    assert [line for line in lines if "DeepSpeed" not in line] == []
    if answers.offload:
        assert "offload" in " ".join(key for key, value in values(found).items() if value is True)
    plain = json.loads(path.read_text()) if name.endswith("json") else yaml.safe_load(path.read_text())
    assert plain == build_values(answers)


@pytest.mark.parametrize("answers", EVERY)
@pytest.mark.parametrize("name", ["file.yaml", "file.json"])
def test_accelerate_loads_them_unchanged(tmp_path: Path, answers: Answers, name: str) -> None:
    pytest.importorskip("accelerate")
    from accelerate.commands.config.config_args import load_config_from_file

    write(tmp_path / name, build_values(answers), replace=False)
    loaded = load_config_from_file(str(tmp_path / name))
    assert loaded.num_processes == answers.processes and loaded.mixed_precision == answers.precision
    assert loaded.use_cpu is (answers.device == "cpu")


def test_file_that_is_there_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "file.yaml"
    path.write_text("mine: 1\n")
    with pytest.raises(RequestError, match="exists"):
        write(path, build_values(FOUR), replace=False)
    assert path.read_text() == "mine: 1\n"
    assert write(path, build_values(FOUR), replace=True) == tmp_path / "file.yaml.bak"
    assert write(path, build_values(FOUR), replace=True) is None  # the same again
    assert write(path, build_values(suggest_answers(CPU)), replace=True) == tmp_path / "file.yaml.bak2"
    assert (tmp_path / "file.yaml.bak").read_text() == "mine: 1\n"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["file.yaml", "file.yaml.bak", "file.yaml.bak2"]


def test_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RequestError, match="cannot be written"):
        write(tmp_path / "file" / "accelerate.yaml", build_values(FOUR), replace=False)
