"""Recipes made to exhaust time or memory are refused in words, at once."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from trainwright.errors import RequestError
from trainwright.recipe.loading import load_recipe

Refusal = Callable[..., list[str]]
Write = Callable[..., Path]

ALIASES = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join(['*' + before] * 9)}]\n" for before, name in pairwise("abcdefghij")
)
CHAIN = "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}]\n" for n in range(1, 2000))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (ALIASES, "run.yaml:4: YAML aliases repeat more than 10,000 values"),
        (CHAIN, "run.yaml:4: not valid YAML: nested more than 64 deep by aliases"),
        ("evaluate: {prompts: [" + "1," * 50_000 + "1]}\n", "run.yaml:4: not valid YAML: more than 50,000 keys"),
        ("train: {max_steps: " + "9" * 2**20 + "}\n", "run.yaml: is larger than 1 MiB"),
        ("train: {max_steps: " + "9" * 10_000 + "}\n", "run.yaml:4: not valid YAML: "),
        ("model: {config: {model_type: llama, num_hidden_layers: 1000000000}, tokenizer: bytes}\n", "run.yaml:4: "),
    ],
    ids=["aliases of aliases", "chain of aliases", "values", "size", "digits", "layers"],
)
def test_what_would_take_all_memory_or_time_is_refused(refusal: Refusal, text: str, says: str) -> None:
    assert refusal(text)[0].startswith(says)


def test_more_processes_than_there_are_on_earth_are_refused(refusal: Refusal) -> None:
    (line,) = refusal("", "parallel.num_processes=1000000000")
    assert "parallel.num_processes: expected a whole number from 1 to 1,000,000" in line


def test_an_override_and_an_included_file_are_bounded_too(refusal: Refusal, write: Write) -> None:
    write("train: " + "[" * 100, "deep.yaml")
    assert refusal("include: deep.yaml\n")[0].startswith("deep.yaml:1: not valid YAML: nested more than 64 deep")
    many = "[&a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1], " + "*a, " * 2000 + "*a]"
    assert "YAML aliases repeat" in refusal("", f"evaluate.prompts={many}")[0]


def test_files_that_include_each_other_again_and_again_are_refused(refusal: Refusal, write: Write) -> None:
    for one, other in pairwise("abcdefghijklm"):
        write(f"include: [{other}.yaml, {other}.yaml]\n", f"{one}.yaml")
    write("train: {seed: 1}\n", "m.yaml")
    assert "include: more than 100 files" in refusal("include: a.yaml\n")[0]
    for number in range(30):
        write(f"include: f{number + 1}.yaml\n", f"f{number}.yaml")
    assert "nested more than" in refusal("include: f0.yaml\n")[0]


def test_many_problems_are_counted_and_the_first_are_shown(refusal: Refusal) -> None:
    lines = refusal("".join(f"a{n}: 1\n" for n in range(2000)))
    assert len(lines) < 40 and lines[-1] == "run.yaml:34: a30: and 1,970 more unknown keys"
    lines = refusal("evaluate: {prompts: [" + "1," * 500 + "1]}\n")
    assert len(lines) == 101 and lines[-1] == "and 401 more problems"


def test_a_device_and_a_pipe_are_no_recipes(refusal: Refusal) -> None:
    with pytest.raises(RequestError, match="is a device, not a file"):
        load_recipe(Path("/dev/zero"))
    os.mkfifo("pipe.yaml")
    assert "pipe.yaml: is a named pipe, not a file" in refusal("include: pipe.yaml\n")[0]
