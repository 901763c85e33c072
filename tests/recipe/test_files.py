"""Files of settings are read with bounds: JSON that is wrong, or made to exhaust the reader, is refused in words."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trainwright.errors import RequestError
from trainwright.recipe.files import parse_json, read_json, read_text
from trainwright.recipe.sections.model import check_sizes


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"a": \n}', r"^x\.json:2:1: not JSON: "),
        ("[" * 65 + "]" * 65, r"^x\.json: nested more than 64 deep$"),
        ("[" * 100_000, r"^x\.json: nested more than 64 deep$"),
        ('{"a":' * 500 + "1" + "}" * 500, r"^x\.json: nested more than 64 deep$"),
        ("1" * 10_000, r"^x\.json: Exceeds the limit"),
    ],
)
def test_json_that_is_wrong_or_hostile(text: str, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        parse_json(text, "x.json")


def test_json_as_deep_as_is_taken() -> None:
    value = parse_json("[" * 64 + "]" * 64, "x.json")
    for _ in range(63):
        (value,) = value
    assert value == []


def test_a_json_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"b": 1}')
    assert read_json(tmp_path / "a.json") == {"b": 1}
    with pytest.raises(RequestError, match=r"b\.json: no such file; did you mean .*a\.json\?"):
        read_json(tmp_path / "b.json")
    (tmp_path / "a.json").write_text(" " * (16 * 2**20 + 1))
    with pytest.raises(RequestError, match="is larger than 16 MiB"):
        read_json(tmp_path / "a.json")


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    pipe = tmp_path / "a.yaml"
    os.mkfifo(pipe)
    with pytest.raises(RequestError, match=r"a\.yaml: is a named pipe, not a file$"):
        read_text(pipe)
    for device in ("/dev/zero", "/dev/ptmx"):
        with pytest.raises(RequestError, match=f"^{device}: is a device, not a file$"):
            read_text(Path(device))


def test_what_a_shell_hands_over_from_another_command_is_read() -> None:
    read, write = os.pipe()
    os.write(write, b"task: sft\n")
    os.close(write)
    try:
        assert read_text(Path(f"/dev/fd/{read}")) == "task: sft\n"
    finally:
        os.close(read)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"num_hidden_layers": 10**9}, r"^c: num_hidden_layers: 1,000,000,000 layers are too many"),
        ({"vocab_size": 10**12}, r"^c: vocab_size: 1,000,000,000,000 tokens are too many"),
        ({"n_layer": 10**5}, "n_layer"),
        ({"text_config": {"num_hidden_layers": 10**6}}, r"^c: text_config\.num_hidden_layers: "),
        ({"num_experts": 10**9}, "experts"),
        ({"num_attention_heads": 10**9}, "heads"),
        ({"hidden_size": 10**13}, r"^c: hidden_size: 10,000,000,000,000 is too large"),
        ({"vocab_size": 10**300}, r"^c: vocab_size: a number of .* digits is too large"),
    ],
)
def test_sizes_that_no_model_has(config: dict[str, object], says: str) -> None:
    with pytest.raises(RequestError, match=says):
        check_sizes(config, "c")


def test_sizes_of_todays_and_tomorrows_models() -> None:
    check_sizes({"num_hidden_layers": 1000, "num_experts": 4096, "vocab_size": 10**6, "rope_theta": 1e30}, "c")
