"""Files as people have them, read."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.compatibility.accelerate.files import LOOSE_DDP, written
from trainwright.compatibility.accelerate.reading import locate_default_file, read, read_json
from trainwright.errors import RequestError


def values(tmp_path: Path, text: str, name: str = "file") -> dict[str, object]:
    return read(written(tmp_path, text, name)).values


@pytest.mark.parametrize(
    "text",
    [
        "distributed_type: MULTI_GPU\nsame_network: true\ntpu_env: null\nnum_processes: 4\n",
        '{"distributed_type": "MULTI_GPU", "same_network": true, "tpu_env": null, "num_processes": 4}',
        '{"distributed_type": "MULTI_GPU", "same_network": True, "tpu_env": None, "num_processes": 4,}',
        "{'distributed_type': 'MULTI_GPU', 'same_network': True, 'tpu_env': None, 'num_processes': 4}",
        '{\n\t"distributed_type":"MULTI_GPU",\n\t"same_network":true, // both\n\t"tpu_env":null, /* a\n b */\n'
        '\t"num_processes":4\n}\n',
        "\ufeff---\r\ndistributed_type: MULTI_GPU\r\nsame_network: True\r\ntpu_env: None\r\nnum_processes: 4\r\n",
        "# mine\n{distributed_type: MULTI_GPU, same_network: true, tpu_env: ~, num_processes: 4}",
    ],
)
@pytest.mark.parametrize("name", ["file.yaml", "file.json", "file"])
def test_yaml_json_and_loose_json_whatever_the_name(tmp_path: Path, text: str, name: str) -> None:
    expected = {"distributed_type": "MULTI_GPU", "same_network": True, "tpu_env": None, "num_processes": 4}
    assert values(tmp_path, text, name) == expected


def test_address_in_loose_json_is_no_comment(tmp_path: Path) -> None:
    text = """{'distributed_type': 'NO', "main_process_ip": "http://host", 'command_file': 'it\\'s // here'}"""
    assert values(tmp_path, text)["main_process_ip"] == "http://host"


def test_unquoted_no_stays_a_word(tmp_path: Path) -> None:
    assert values(tmp_path, "distributed_type: NO\nmixed_precision: no\n") == {
        "distributed_type": "NO",
        "mixed_precision": "no",
    }


def test_lines_are_known_and_what_accelerate_itself_refuses(tmp_path: Path) -> None:
    source = read(written(tmp_path, LOOSE_DDP, "ddp.json"))
    assert source.place("distributed_type") == f"{tmp_path / 'ddp.json'}:4"
    assert source.remarks == ("is not strict JSON",)
    lower = read(written(tmp_path, "compute_environment: local_machine\ndistributed_type: multi_gpu\n"))
    assert lower.remarks == ("compute_environment and distributed_type not in capitals",)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        ("  \n", "is empty"),
        ("- MULTI_GPU\n", "is not an Accelerate file"),
        ('["MULTI_GPU"]', "is not an Accelerate file"),
        ("just words\n", "is not an Accelerate file"),
        ('{"distributed_type": "NO"', ":1: the bracket that begins here, or one before it, is not closed"),
        (
            '{\n"distributed_type": "NO",\n"num_processes": 4\n"x": 1}',
            ":4: a comma is missing, or the bracket of line 1",
        ),
        ("a: b: c\n", ":1: a: has two keys on one line"),
        ('{"distributed_type": "NO",\n "a": ' + "[" * 20000, ":2: not valid JSON: nested more than"),
        ('{"distributed_type": "NO",\n "a": ' + "[" * 200 + "]" * 200 + "}", ":2: not valid JSON: nested more than"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(RequestError, match=r"file\.yaml") as refused:
        values(tmp_path, text, "file.yaml")
    assert said in str(refused.value) and "recipe" not in str(refused.value)


def test_missing_file_names_the_near_one(tmp_path: Path) -> None:
    written(tmp_path, "distributed_type: NO\n", "default_config.yaml")
    with pytest.raises(RequestError, match="did you mean"):
        read(tmp_path / "default_conf.yaml")


def test_deepspeed_files_may_be_loose_too(tmp_path: Path) -> None:
    path = written(tmp_path, "{'zero_optimization': {'stage': 2,}, 'fp16': {'enabled': True}}", "ds.json")
    assert read_json(path) == {"zero_optimization": {"stage": 2}, "fp16": {"enabled": True}}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"HF_HOME": "/hf"}, "/hf/accelerate/default_config.yaml"),
        ({"XDG_CACHE_HOME": "/cache"}, "/cache/huggingface/accelerate/default_config.yaml"),
        ({"HOME": "/home/me"}, "/home/me/.cache/huggingface/accelerate/default_config.yaml"),
    ],
)
def test_default_place_is_accelerates(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: str
) -> None:
    for name in ("HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert locate_default_file() == Path(expected)
