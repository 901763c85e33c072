"""The planted bugs of bench/mutations/*.toml: an area a file, each bug a replacement of text in one source file."""

from __future__ import annotations

import hashlib
import tomllib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LISTS = ROOT / "bench" / "mutations"


class ListError(Exception):
    """The list and the source do not fit each other; the message has a line for each problem."""


@dataclass(frozen=True)
class Mutation:
    """One planted bug.

    Attributes:
        area: the name of the file that lists it.
        file: the source file, relative to the root of the repository.
        old: text that the file has exactly once, which ``new`` replaces.
        bug: what is wrong then, in words.
        source: where the bug, or its kind, was reported.
        tests: test files, or tests as pytest names them, the likeliest to catch it first.
    """

    name: str
    area: str
    file: str
    old: str
    new: str
    bug: str
    source: str
    tests: tuple[str, ...]

    def applied(self, text: str) -> str:
        """The text of the source file with the bug."""
        return text.replace(self.old, self.new)

    def problems(self, root: Path) -> list[str]:
        """Why the bug cannot be planted in the source below ``root``, or not be tested."""
        place = f"{self.area}.toml: {self.name}"
        file = root / self.file
        missing = [f"{place}: there is no {test}" for test in self.tests if not (root / test_file(test)).is_file()]
        if not file.is_file():
            return [f"{place}: there is no {self.file}", *missing]
        count = file.read_text(encoding="utf-8").count(self.old)
        if count != 1:
            found = "is not found" if not count else f"is found {count} times"
            first = self.old.strip().splitlines()[0].strip()
            missing.insert(0, f"{place}: the text to replace {found} in {self.file} ({first})")
        if self.old == self.new or not self.tests:
            missing.append(f"{place}: it changes nothing, or names no tests")
        return missing

    def key(self, root: Path) -> str:
        """A digest of what decides the outcome: the bug, the source file, the tests and what lies beside them."""
        digest = hashlib.sha256(repr((self.file, self.old, self.new, self.tests)).encode())
        tests = [root / test_file(test) for test in dict.fromkeys(self.tests)]
        helpers = {file for test in tests for file in test.parent.glob("*.py") if not file.name.startswith("test_")}
        for file in (root / self.file, *sorted({*tests, *helpers})):
            digest.update(file.read_bytes())
        return digest.hexdigest()[:32]


def test_file(test: str) -> str:
    """The file of a test as pytest names it."""
    return test.partition("::")[0]


def read_list(directory: Path = LISTS, root: Path = ROOT) -> list[Mutation]:
    """All mutations, area by area.

    Raises:
        ListError: a text that is not found exactly once, a file that is missing, or a name that is taken.
    """
    found = [mutation for file in sorted(directory.glob("*.toml")) for mutation in _read(file)]
    problems = [problem for mutation in found for problem in mutation.problems(root)]
    problems += [
        f"the name {name} is taken {count} times"
        for name, count in Counter(mutation.name for mutation in found).items()
        if count > 1
    ]
    if problems:
        raise ListError("\n".join(problems))
    return found


def _read(file: Path) -> list[Mutation]:
    listed = tomllib.loads(file.read_text(encoding="utf-8"))
    usual: Sequence[str] = listed.get("tests", ())
    return [
        Mutation(area=file.stem, **{**entry, "tests": tuple(entry.get("tests", usual))}) for entry in listed["mutation"]
    ]
