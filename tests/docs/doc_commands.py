"""The shell commands in the Markdown of the repository, and which of them tests run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.commands import ROOT

PROGRAMS = ("trainwright", "python", "make", "pip", "torchrun", "accelerate", "srun", "mpirun", "git")
_SHELL = ("", "bash", "sh", "shell", "console")

TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
GUIDES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]

# Why a command is not run: the first pattern that is found in it gives the reason. All others are run.
NOT_RUN = {
    r"^(make|pip|git) ": "installs, or is run by CI itself",
    r"^python bench/": "a bench: minutes, other programs in environments of their own, or rewriting results",
    r"^(torchrun|accelerate|srun|mpirun) |^python -m trainwright\.worker": "other launchers: tests/run runs them",
    r"^trainwright drill ": "minutes: tests/faults/drills runs them",
    r"^trainwright (watch|gpus --watch|tensorboard)": "goes on until Ctrl-C: their own tests have it",
    r"^trainwright doctor(?! --explain docs)": "looks at this machine: tests/doctor runs its checks",
    r"s3://": "a bucket: tests/run/test_stored_runs.py runs such commands",
    r"--rendezvous|--hosts |^trainwright launch --host": "several nodes: tests/run and tests/cli run them",
    r"^trainwright (submit .*--to slurm(?!.*--print)|stop runs/tiny$)": "a cluster: tests/clusters/slurm runs the page",
    r"--to (pods|sky|sky-nodes|spot-pods) ": "a cluster of clusters.yaml: tests/docs/test_clusters.py runs them",
    r"<name>|\b(FILE|RUN|MODEL|BASE|STUDY|RECIPE|SCRIPT)\b": "names what the reader has",
    r"\b(my|more|raw|export|pairs|rows|test|tinyshakespeare)\.(jsonl|csv|txt)|documents/|[ =]recipe\.yaml": (
        "files of the reader"
    ),
    r"pretrain/shakespeare\.yaml": "a file of the reader",
    r"--fork runs/base@400": "a run of the reader: tests/run/test_fork.py forks",
    r"tickets\.yaml": "files of the reader: test_the_page_about_own_data_runs writes and runs them",
    r"openwebtext|recipes/unlearn/tofu\.yaml|(tofu|muse)-grid|tofu-tiny": "a model or data set of the Hub",
    r"^trainwright \w+ recipes/.*(quickstart|lora|darkroom|pendulum|stdlib-tiny)\.yaml(?!.*max_steps=20)": "minutes",
}


@dataclass(frozen=True)
class Command:
    """A command of a page, its words without the path of the environment and without comments."""

    file: Path
    line: int
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.file.relative_to(ROOT)}:{self.line}: {shlex.join(self.words)}"

    @property
    def text(self) -> str:
        return " ".join(self.words)

    @property
    def reason_not_to_run(self) -> str | None:
        return next((reason for pattern, reason in NOT_RUN.items() if re.search(pattern, self.text)), None)


def commands_of(file: Path) -> list[Command]:
    """All shell commands of a page, in order."""
    found = []
    for line, text in _joined(_shell_lines(file.read_text(encoding="utf-8"))):
        words = _words(text)
        if words and words[0] in PROGRAMS:
            found.append(Command(file, line, tuple(words)))
    return found


def _shell_lines(text: str) -> Iterator[tuple[int, str]]:
    """The lines of indented blocks and of fenced ones without a language other than the shell's, and last columns of
    tables that begin with a command.
    """
    fence, blank, inside = None, True, False
    for number, line in enumerate(text.splitlines(), 1):
        if match := re.match(rf"\|.*\| `((?:{'|'.join(PROGRAMS)}) [^`]+)`[^|]*\|$", line):
            yield number, match[1]
        elif match := re.match(r"\s*```(\w*)", line):
            fence = None if fence is not None else match[1]
        elif fence is not None:
            if fence in _SHELL:
                yield number, line
        elif line.startswith("    ") and (blank or inside):
            inside = True
            yield number, line
        else:
            inside = False
        blank = not line.strip()
        inside = inside and fence is None


def _joined(lines: Iterator[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """Lines that end with a backslash and what follows them as one."""
    begun: tuple[int, str] | None = None
    for number, line in lines:
        first, text = begun or (number, "")
        text += line.strip()
        if text.endswith("\\"):
            begun = (first, text.removesuffix("\\"))
        else:
            begun = None
            yield first, text


def _words(text: str) -> list[str]:
    """The words of a line that is a command, after variables and `.venv/bin/`; none where it is something else."""
    if not re.match(rf"(\w+=\S+ )*(\.venv/bin/)?({'|'.join(PROGRAMS)}) ", text + " "):
        return []
    words = shlex.split(text.partition(" && ")[0], comments=True)
    while re.fullmatch(r"\w+=.*", words[0]):
        words.pop(0)
    return [words[0].removeprefix(".venv/bin/"), *words[1:]]
