from __future__ import annotations

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from trainwright.cli.machine import app
from trainwright.errors import RequestError


def shown(*arguments: str) -> str:
    return CliRunner().invoke(app, arguments, catch_exceptions=False).output


def test_a_described_machine_is_shown() -> None:
    text = shown("--on", "4x8xA100-40GB@8x200Gb")
    assert "4x8xA100-40GB" in text and "NVLink 3, 300 GB/s each way" in text
    assert "1,600 Gb/s per node, 25 GB/s per device each way" in text
    assert "bf16 312" in text and "https://" in text


def test_this_machine_is_shown() -> None:
    assert "free on this disk" in shown()


def test_a_machine_is_shown_as_json() -> None:
    values = json.loads(shown("--on", "8xH100", "--json"))
    assert (values["devices"], values["device"], values["card"]["rates"]["bf16"]) == (8, "cuda", 989.4e12)
    assert json.loads(shown("--json"))["devices"] >= 1


def test_the_cards_are_listed_with_their_sources() -> None:
    text = shown("cards")
    assert "MI300X" in text and "NVIDIA H200 Tensor Core GPU datasheet: https://" in text


def test_a_card_that_does_not_exist_is_refused() -> None:
    with pytest.raises(RequestError, match="did you mean H100"):
        shown("--on", "8xH10O")


def test_showing_a_described_machine_imports_nothing_heavy() -> None:
    program = (
        "import sys; from trainwright.cli.machine import app\n"
        "app(['--on', '8xH100'], standalone_mode=False)\n"
        "assert not {'torch', 'transformers', 'numpy', 'yaml', 'rich', 'pynvml'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
