"""The image's file, read as Docker reads it; building it needs a Docker daemon, and no test does."""

from __future__ import annotations

import fnmatch
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from tests.support.commands import ROOT

TEXT = (ROOT / "Dockerfile").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
_WORDS = {"ARG", "FROM", "RUN", "ENV", "WORKDIR", "COPY", "USER", "CMD"}


def instructions() -> list[tuple[str, str]]:
    """The instructions and their arguments, continued lines joined."""
    plain = "\n".join(line for line in TEXT.splitlines() if line.strip() and not line.lstrip().startswith("#"))
    joined = plain.replace("\\\n", " ")
    return [(line.split(" ", 1)[0], line.split(" ", 1)[1].strip()) for line in joined.splitlines()]


def stages() -> list[list[tuple[str, str]]]:
    found: list[list[tuple[str, str]]] = []
    for word, rest in instructions():
        if word == "FROM":
            found.append([])
        if found:
            found[-1].append((word, rest))
    return found


def test_it_has_only_known_instructions_and_two_stages() -> None:
    assert {word for word, _ in instructions()} == _WORDS
    bases = [stage[0][1] for stage in stages()]
    assert bases == ["python:${PYTHON}-slim-bookworm AS build", "python:${PYTHON}-slim-bookworm"]
    (version,) = (rest.partition("=")[2] for word, rest in instructions() if rest.startswith("PYTHON="))
    minor = int(re.fullmatch(r">=3\.(\d+)", PROJECT["requires-python"])[1])  # type: ignore[index]
    assert int(version.removeprefix("3.")) >= minor


def test_the_image_runs_as_a_user_whose_number_is_not_roots() -> None:
    last = [rest for word, rest in stages()[-1] if word == "USER"][-1]
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", last)
    (created,) = re.findall(r"useradd --uid (\d+)", TEXT)
    assert last.split(":")[0] == created
    words = [word for word, _ in stages()[-1]]
    assert "RUN" not in words[words.index("USER") :]


def test_layers_keep_no_caches_and_nothing_comes_by_chance() -> None:
    for _, rest in (each for each in instructions() if each[0] == "RUN"):
        if "apt-get install" in rest:
            assert "--no-install-recommends" in rest and "rm -rf /var/lib/apt/lists/*" in rest and "update &&" in rest
        for install in re.findall(r"pip install[^&]*", rest):
            assert "--no-cache-dir" in install
            assert "--constraint constraints.txt" in install or "--no-deps --require-hashes" in install
        assert not re.search(r"\bsudo\b|\bcurl\b|\bwget\b", rest)


def test_what_is_copied_is_there_and_not_ignored() -> None:
    rules = (ROOT / ".dockerignore").read_text().split()
    assert rules[0] == "*"
    for word, rest in instructions():
        if word != "COPY" or rest.startswith("--from"):
            continue
        for source in rest.split()[:-1]:
            assert (ROOT / source).exists() and f"!{source}" in rules
    assert {str(PROJECT["readme"]), "LICENSE"} <= {rule.removeprefix("!") for rule in rules}
    assert not [rule for rule in rules if rule.startswith("!") and fnmatch.fnmatch(".git", rule[1:])]


def test_the_extras_are_ones_that_there_are() -> None:
    (extras,) = (rest.partition("=")[2] for word, rest in instructions() if rest.startswith("EXTRAS="))
    assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])


def test_the_packages_of_the_image_are_the_tested_versions_with_hashes() -> None:
    text = (ROOT / "requirements.lock").read_text()
    entries = re.findall(r"^(\S+)==(\S+)((?: \\\n    --hash=sha256:[0-9a-f]{64})+)$", text, re.MULTILINE)
    locked = {name: version for name, version, _ in entries}
    assert len(locked) == text.count("==")
    tested = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    assert {name: tested[name] for name in locked.keys() & tested.keys()} == {
        name: version for name, version in locked.items() if name in tested
    }
    (extras,) = (rest.partition("=")[2] for word, rest in instructions() if rest.startswith("EXTRAS="))
    needed = [PROJECT["dependencies"], *(PROJECT["optional-dependencies"][extra] for extra in extras.split(","))]
    names = {re.match(r"[\w.-]+", each)[0].lower() for group in needed for each in group}  # type: ignore[index]
    assert names - {"torch"} <= locked.keys()


@pytest.mark.parametrize(("device", "code", "index"), [("cpu", 0, "/cpu"), ("cuda", 0, "/cu"), ("tpu", 2, None)])
def test_the_build_argument_chooses_the_wheels_of_torch(
    device: str, code: int, index: str | None, tmp_path: Path
) -> None:
    (script,) = (rest for word, rest in instructions() if word == "RUN" and "case" in rest)
    (tmp_path / "pip").write_text('#!/bin/sh\necho "$@" >words.txt\n')
    (tmp_path / "pip").chmod(0o755)
    variables = {"PATH": f"{tmp_path}:/usr/bin:/bin", "DEVICE": device}
    done = subprocess.run(
        ["sh", "-c", script], env=variables, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == code
    if index is None:
        assert "DEVICE is cuda or cpu, not tpu" in done.stderr and not (tmp_path / "words.txt").exists()
    else:
        words = (tmp_path / "words.txt").read_text().split()
        assert index in words[words.index("--index-url") + 1] and words[-1] == "torch"


def test_every_run_is_a_shells() -> None:
    for word, rest in instructions():
        if word == "RUN":
            subprocess.run(["sh", "-n", "-c", rest], check=True)
