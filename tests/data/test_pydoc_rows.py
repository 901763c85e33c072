from __future__ import annotations

import subprocess
import sys

from trainwright.data.sources.pydoc_rows import LONGEST_ANSWER, SHORTEST_ANSWER, build_pydoc_key, build_pydoc_rows


def test_some_four_thousand_questions_with_clean_answers() -> None:
    rows = build_pydoc_rows()
    assert 3500 <= len(rows) <= 6000
    for row in rows:
        question, answer = row["question"], row["answer"]
        assert row.keys() == {"question", "answer"}
        assert SHORTEST_ANSWER <= len(answer) <= LONGEST_ANSWER
        assert answer == answer.strip()
        assert not any(line != line.rstrip() for line in answer.splitlines())
        assert question[-1] in "?."
    assert len({row["answer"] for row in rows}) == len(rows)
    assert len({row["question"] for row in rows}) >= 0.99 * len(rows)


def test_the_beginning_is_varied() -> None:
    first = build_pydoc_rows()[:100]
    assert len({row["question"].split("`")[1].split(".")[0] for row in first if "`" in row["question"]}) >= 25
    assert len({row["question"].split("`")[0] for row in first}) >= 6


def test_well_known_things_are_explained() -> None:
    rows = {row["question"]: row["answer"] for row in build_pydoc_rows()}
    by_name = {question.split("`")[1]: answer for question, answer in rows.items() if "`" in question}
    assert by_name["os.path.join"].startswith("Join two or more pathname components")
    assert {"len", "str.join", "itertools.chain", "os.getpid", "asyncio.Queue"} <= by_name.keys()
    assert any("`with` statement" in question for question in rows)


def test_the_same_in_every_process_and_whatever_was_imported_or_set() -> None:
    code = (
        "import json, os\n"
        "json.dumps.__doc__ = 'patched, and long enough to be taken for an answer'\n"
        "from trainwright.data.sources.pydoc_rows import build_pydoc_rows\n"
        "import hashlib; print(hashlib.sha256(repr(build_pydoc_rows()).encode()).hexdigest())"
    )
    digests = set()
    for flags in ([], ["-OO"]):
        done = subprocess.run([sys.executable, *flags, "-c", code], capture_output=True, text=True, check=True)
        assert not done.stderr
        digests.add(done.stdout)
    assert len(digests) == 1


def test_nothing_is_imported_here() -> None:
    code = (
        "import sys; from trainwright.data.sources.pydoc_rows import build_pydoc_rows\n"
        "before = set(sys.modules); build_pydoc_rows()\n"
        "assert set(sys.modules) - before <= {'_posixsubprocess'}, set(sys.modules) - before"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_key_is_the_interpreters() -> None:
    assert build_pydoc_key() == build_pydoc_key()
    assert sys.version in build_pydoc_key()
