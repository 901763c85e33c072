"""Built-in datasets: the documentation of the running Python interpreter as questions and answers, correct and wrong.

Docstrings of the standard library's modules, classes, functions and methods, and the topics of Python's ``help``, are
real English text available on every machine with Python. A separate, isolated interpreter collects them, so that the
imports do not affect this process and modules already patched here do not affect the text.

That interpreter runs this file as a script, which imports only the standard library.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
import os
import platform
import random
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LONGEST_ANSWER = 1200  # characters; whole paragraphs up to this length are kept
SHORTEST_ANSWER = 24  # shorter docstrings carry too little information

# Not imported: modules that act on import (open a browser, print, patch, start a loop), need a display, are tests or
# build tools, or are deprecated and warn.
_SKIPPED = """
    __main__ antigravity this idlelib turtle turtledemo tkinter test lib2to3 distutils ensurepip venv pip
    __phello__ __hello__ pydoc_data asynchat asyncore imp smtpd aifc audioop cgi cgitb chunk crypt imghdr
    mailcap msilib msvcrt nis nntplib ossaudiodev pipes sndhdr spwd sunau telnetlib uu xdrlib winreg
    winsound nt ntpath posix posixpath _winapi sre_compile sre_constants sre_parse readline rlcompleter site
    sitecustomize usercustomize pyexpat xxlimited xxlimited_35 xxsubtype genericpath nturl2path encodings
""".split()  # noqa: SIM905 (a list of names reads better so)
_SUBMODULES = """
    os.path collections.abc concurrent.futures curses.ascii email.charset email.header email.headerregistry
    email.message email.mime.text email.policy email.utils html.entities html.parser http.client
    http.cookiejar http.cookies http.server importlib.abc importlib.machinery importlib.metadata
    importlib.resources importlib.util json.decoder json.encoder logging.config logging.handlers
    multiprocessing.connection multiprocessing.managers multiprocessing.pool multiprocessing.queues
    multiprocessing.shared_memory multiprocessing.synchronize unittest.case unittest.mock unittest.suite
    urllib.error urllib.parse urllib.request urllib.response urllib.robotparser wsgiref.handlers
    wsgiref.headers wsgiref.simple_server wsgiref.util xml.dom.minidom xml.dom.pulldom xml.etree.ElementTree
    xml.sax.handler xml.sax.saxutils xml.sax.xmlreader xmlrpc.client xmlrpc.server zoneinfo asyncio.events
    asyncio.locks asyncio.queues asyncio.streams asyncio.subprocess ctypes.util dbm.dumb
""".split()  # noqa: SIM905

_PHRASINGS = {
    "module": ("What is the Python module `{}` for?", "What does the `{}` module provide?", "Describe `{}`."),
    "class": ("What is `{}` in Python?", "Explain the class `{}`.", "What is the Python class `{}` used for?"),
    "function": (
        "What does `{}` do in Python?",
        "How does the function `{}` work?",
        "Explain the Python function `{}`.",
        "What is `{}` for?",
    ),
    "method": (
        "What does the method `{}` do?",
        "What does `{}` do in Python?",
        "Explain the method `{}`.",
        "When would I call `{}`?",
    ),
    "topic": ("Explain {} in Python.", "What does the Python documentation say about {}?", "How does Python treat {}?"),
}


def build_pydoc_rows() -> list[dict[str, str]]:
    """Return about 4,000 rows ``{"question", "answer"}`` in a fixed shuffled order, equal for equal interpreters.

    Raises:
        RuntimeError: the interpreter that collects the documentation failed.
    """
    # -I and -S keep PYTHON* variables (PYTHONOPTIMIZE=2 drops docstrings) and site-packages out.
    command = [sys.executable, "-I", "-S", "-B", "-W", "ignore", str(Path(__file__).resolve())]
    process = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, check=False)
    if process.returncode:
        raise RuntimeError(f"collecting Python's documentation failed:\n{process.stderr.decode(errors='replace')}")
    rows: list[dict[str, str]] = json.loads(process.stdout)
    return rows


def build_pydoc_pairs() -> list[dict[str, str]]:
    """Return the same questions as rows ``{"prompt", "chosen", "rejected"}``; the wrong answer is the next row's.

    Every answer is chosen once and rejected once, so only the question decides which is correct.
    """
    rows = build_pydoc_rows()
    return [
        {"prompt": row["question"], "chosen": row["answer"], "rejected": next_row["answer"]}
        for row, next_row in zip(rows, [*rows[1:], *rows[:1]], strict=True)
    ]


def build_pydoc_key() -> str:
    """Return a key that changes whenever the rows may change: with the interpreter, its library path, or this file."""
    source = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    return "\n".join((sys.version, sys.platform, platform.machine(), os.path.dirname(os.__file__), source))


def _collect() -> list[dict[str, str]]:
    rows, answers = [], set()
    for kind, name, text in [*_iterate_docstrings(), *_iterate_topics()]:
        answer = _clean_docstring(text)
        if len(answer) < SHORTEST_ANSWER or answer in answers:
            continue
        answers.add(answer)
        phrasings = _PHRASINGS[kind]
        choice = hashlib.sha256(name.encode()).digest()[0] % len(phrasings)
        rows.append({"question": phrasings[choice].format(name), "answer": answer})
    random.Random(0).shuffle(rows)
    return rows


def _clean_docstring(text: str) -> str:
    """Dedent a docstring, strip trailing spaces, and keep whole paragraphs up to ``LONGEST_ANSWER`` characters."""
    text = "\n".join(line.rstrip() for line in inspect.cleandoc(text).splitlines())
    paragraphs = [part for part in re.split(r"\n{2,}", text) if part.strip()]
    selection: list[str] = []
    length = 0
    for paragraph in paragraphs:
        length += len(paragraph) + 2
        if selection and length > LONGEST_ANSWER:
            break
        selection.append(paragraph)
    answer = "\n\n".join(selection)
    if len(answer) > LONGEST_ANSWER:  # one long paragraph: keep whole lines of it
        answer = answer[: answer.rfind("\n", 0, LONGEST_ANSWER)] if "\n" in answer[:LONGEST_ANSWER] else ""
    return answer.strip()


def _iterate_docstrings() -> Iterator[tuple[str, str, str]]:
    """Yield ``(kind, qualified name, docstring)``, sorted by module name."""
    names = {name for name in sys.stdlib_module_names if not name.startswith("_") and name not in _SKIPPED}
    for name in sorted(names | set(_SUBMODULES)):
        try:
            module = importlib.import_module(name)
        except (ImportError, OSError):  # not built on this platform
            continue
        if module.__doc__:
            yield "module", name, module.__doc__
        yield from _iterate_members(name, module)


def _iterate_members(name: str, module: types.ModuleType) -> Iterator[tuple[str, str, str]]:
    public = getattr(module, "__all__", None) or [key for key in vars(module) if not key.startswith("_")]
    for key in sorted(set(public)):
        value = vars(module).get(key)
        owner = getattr(value, "__module__", None)
        # Imported names are documented in the module that defines them; C modules report `_io` for `io`.
        if isinstance(value, types.ModuleType) or (isinstance(owner, str) and not _has_same_home(owner, name, module)):
            continue
        label = key if name == "builtins" else f"{name}.{key}"
        if inspect.isclass(value):
            if value.__doc__:
                yield "class", label, value.__doc__
            yield from _iterate_methods(label, value)
        elif inspect.isroutine(value) and value.__doc__:
            yield "function", label, value.__doc__


def _has_same_home(owner: str, name: str, module: types.ModuleType) -> bool:
    if name == "os" and owner == "posix":  # os re-exports posix
        return True
    return owner == module.__name__ or owner.lstrip("_").split(".")[0] in (name.split(".")[0], module.__name__)


def _iterate_methods(label: str, owner: type) -> Iterator[tuple[str, str, str]]:
    for key, value in sorted(vars(owner).items()):
        if key.startswith("_"):
            continue
        if isinstance(value, (classmethod, staticmethod)):
            value = value.__func__
        text: Any = getattr(value, "__doc__", None)
        if isinstance(value, property) or not callable(value) or inspect.isclass(value):
            continue
        if isinstance(text, str):
            yield "method", f"{label}.{key}", text


def _iterate_topics() -> Iterator[tuple[str, str, str]]:
    from pydoc_data.topics import topics

    for name, text in sorted(topics.items()):
        # The first lines are a heading, underlined with stars, equals signs or dashes; it becomes the question.
        lines = text.strip().splitlines()
        has_rule = len(lines) > 1 and re.fullmatch(r"[*=\-\"^~]{3,}", lines[1].strip())
        title = lines[0].strip() if has_rule else name
        body = "\n".join(lines[2:] if has_rule else lines)
        yield "topic", _format_topic_title(title), body


def _format_topic_title(title: str) -> str:
    title = re.sub(r"[\"“”]", "`", title)
    if title.startswith("The ") or not title[1:2].islower():
        return title.replace("The ", "the ", 1)
    return title[0].lower() + title[1:]


def _main() -> None:
    # Output of imported modules must not be mixed with the rows.
    out = os.dup(1)
    os.dup2(2, 1)
    text = json.dumps(_collect())
    with os.fdopen(out, "w") as stream:
        stream.write(text)
        stream.flush()
        os._exit(0)  # skip the exit handlers of two hundred imported modules


if __name__ == "__main__":
    _main()
