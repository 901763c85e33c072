"""Which machine can use torch.compile."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainwright.machine import processor
from trainwright.machine.processor import explain_no_compile, explain_no_triton


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty directory as the only one with programs; Triton and the headers of Python are there."""
    bin_directory = tmp_path / "bin"
    for directory in (bin_directory, tmp_path / "site" / "triton", tmp_path / "include"):
        directory.mkdir(parents=True)
    (tmp_path / "site" / "triton" / "__init__.py").touch()
    (tmp_path / "include" / "Python.h").touch()
    monkeypatch.setenv("PATH", str(bin_directory))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / name))
    explain_no_triton.cache_clear()
    yield bin_directory
    explain_no_triton.cache_clear()


def program(directory: Path, name: str) -> None:
    (directory / name).touch(mode=0o755)


def test_a_cpu_needs_the_compiler_that_torch_calls(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert explain_no_compile("cpu") == "needs a C++ compiler (g++, or the one in $CXX), which is not installed"
    program(programs, "clang++")  # torch does not look for it
    assert explain_no_compile("cpu") is not None
    monkeypatch.setenv("CXX", "clang++ -O1")
    assert explain_no_compile("cpu") is None
    monkeypatch.delenv("CXX")
    program(programs, "g++")
    assert explain_no_compile("cpu") is None
    monkeypatch.setenv("CXX", "icpx")  # instead of g++
    assert explain_no_compile("cpu") is not None


@pytest.mark.parametrize("name", ["gcc", "clang", "cc"])
def test_a_gpu_needs_a_c_compiler(programs: Path, name: str) -> None:
    assert explain_no_compile("cuda") == "needs a C compiler (gcc or clang, or the one in $CC), which is not installed"
    explain_no_triton.cache_clear()
    program(programs, name)
    assert explain_no_compile("cuda") is None
    assert explain_no_compile("cuda", (6, 1)) == "needs compute capability 7.0 or higher, this GPU has 6.1"


def test_a_gpu_needs_the_headers_of_python(programs: Path) -> None:
    program(programs, "gcc")
    (programs.parent / "include" / "Python.h").unlink()
    found = explain_no_compile("cuda")
    assert found is not None and "Python.h" in found and "python3-dev" in found


def test_a_gpu_needs_triton(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(programs, "gcc")
    monkeypatch.setattr(processor, "find_spec", lambda name: None)
    assert explain_no_compile("cuda") == "needs Triton, which is not installed"
