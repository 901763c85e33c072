"""Where things are kept that can be made again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trainwright.compatibility.accelerate.reading import locate_default_file
from trainwright.compatibility.commands import setup
from trainwright.errors import MachineError, RequestError
from trainwright.machine.cache import find_cache_root


def test_the_variable_names_the_place_before_the_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setenv("TRAINWRIGHT_CACHE", "~/kept")
    assert find_cache_root() == Path("/home/somebody/kept")
    monkeypatch.delenv("TRAINWRIGHT_CACHE")
    assert find_cache_root() == Path("/home/somebody/.cache/trainwright")


def test_a_user_without_a_home_directory_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that runs as a number: no HOME, and no line in the list of users."""
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    for name in ("TRAINWRIGHT_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(MachineError, match=r"no home directory .* set TRAINWRIGHT_CACHE"):
        find_cache_root()
    assert not locate_default_file().is_file()
    with pytest.raises(RequestError, match="--config-file"):
        setup(None, False, True)
