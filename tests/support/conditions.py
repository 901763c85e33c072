"""Runs the tests under conditions that other machines and users have; `make test-conditions` runs all of them.

    python -m tests.support.conditions [CONDITION[+CONDITION ...] ...] [-- ARGUMENTS OF PYTEST]

Each runs in a copy of this checkout, with temporary files beside it. "one-core+path" runs under both at once.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from tests.support.commands import ROOT

_NOBODY, _NAMELESS = 65534, 54321  # the latter is in no list of users
_NOT_COPIED = (".git", ".venv", "runs", "build", "*.egg-info", "__pycache__", ".*_cache", "shared")
_WHOLE = ("--processes", "2", "-m", "not slow")
# Nothing that needs a moment of the processor is to fail for want of it.
_FIXED = ("-q", "-p", "no:cacheprovider", "--timeout", "1800")


@dataclass(frozen=True)
class Condition:
    """``variables``: None removes one. ``user``: whom the tests run as, where this is root. ``name``: of the directory
    that has everything. ``home``: "own", "read-only" or "missing". ``cores``: at most so many. ``busy``: how nice a
    loop on every core is beside the tests.
    """

    variables: Mapping[str, str | None] = field(default_factory=dict)
    user: int | None = None
    name: str = "plain"
    home: str = "own"
    cores: int | None = None
    niceness: int = 0
    busy: int | None = None
    umask: int = -1


def _in_locale(name: str) -> dict[str, str | None]:
    """Python's own ways around the locale are off: files are read and written in its encoding unless said otherwise."""
    return {"LC_ALL": name, "LANG": name, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


# What a batch system, a launcher, make, a terminal and a network leave in an environment; and no interpreter in PATH.
_VARIABLES: dict[str, str | None] = {
    **{"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1"},
    **{"SLURM_JOB_ID": "7", "SLURM_PROCID": "1", "SLURM_NTASKS": "2", "PBS_JOBID": "7", "CUDA_VISIBLE_DEVICES": "0"},
    **{"TRAINWRIGHT_CACHE": "/none", "HF_HOME": "/none", "XDG_CACHE_HOME": "/none", "OMP_NUM_THREADS": "7"},
    **{"COLUMNS": "40", "TERM": "dumb", "FORCE_COLOR": "1", "MAKEFLAGS": "-j7", "MAKELEVEL": "2"},
    **dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9"),
    **{"PYTHONHASHSEED": "1", "PAGER": "false", "EDITOR": "false", "SHELL": "/bin/false", "PATH": "/usr/bin:/bin"},
}

CONDITIONS = {
    "one-core": Condition(cores=1),
    # A loop is a third of what is in the way of a process with this niceness: with less, the tests would stand still.
    "busy": Condition(niceness=19, busy=15),
    "locale-posix": Condition(_in_locale("C")),
    "locale-turkish": Condition(_in_locale("tr_TR")),
    "zone-east": Condition({"TZ": "Asia/Kathmandu"}),  # a quarter of an hour off the hour
    "zone-west": Condition({"TZ": "America/St_Johns"}),
    "no-root": Condition(user=_NOBODY, umask=0o077),
    "nameless-user": Condition(user=_NAMELESS, home="missing"),
    "read-only-home": Condition(user=_NOBODY, home="read-only"),
    "path": Condition(name="a path's späces"),
    "surroundings": Condition(_VARIABLES, umask=0o077),
}


class NotHere(Exception):
    """This machine cannot make the condition; the message says why."""


def run(name: str, arguments: Sequence[str], **more: Any) -> subprocess.CompletedProcess[str]:
    """Run pytest with ``arguments`` under the condition, or several joined by "+"; ``more`` is for subprocess.run.

    May raise NotHere; of several conditions, one that this machine cannot make is left out and named on stderr.
    """
    condition = _together(name.split("+"))
    with _directory(condition) as directory, _loops(condition):
        command = [sys.executable, "-m", "pytest", *_FIXED, *arguments]
        settings: dict[str, Any] = {"cwd": directory / "clone", "env": _environment(condition, directory), "text": True}
        if condition.user is not None and os.geteuid() == 0:
            command = [*as_user(condition.user), *command]
        return subprocess.run(command, preexec_fn=lambda: _enter(condition), **settings, **more)


def _together(names: Sequence[str]) -> Condition:
    """One condition that has what each of them sets; they must not set the same field in two ways."""
    left_out = {name: reason for name in names if (reason := _not_here(CONDITIONS[name]))}
    for name, reason in left_out.items():
        if len(left_out) == len(names):
            raise NotHere(reason)
        print(f"{name}: left out, {reason}", file=sys.stderr)
    changes: dict[str, Any] = {}
    for condition in (CONDITIONS[name] for name in names if name not in left_out):
        for each in fields(Condition):
            value = getattr(condition, each.name)
            if value == getattr(Condition(), each.name):
                continue
            if each.name == "variables":
                value = {**value, **changes.get("variables", {})}
            if changes.setdefault(each.name, value) != value and each.name != "variables":
                raise ValueError(f"{'+'.join(names)}: {each.name} is set in two ways")
            changes[each.name] = value
    return Condition(**changes)


def _not_here(condition: Condition) -> str | None:
    locale = condition.variables.get("LC_ALL")
    return f"there is no locale {locale}" if locale is not None and locale not in _locales() else None


def _enter(condition: Condition) -> None:
    """Of the child, before it is what it becomes."""
    if condition.cores is not None:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: condition.cores])
    os.nice(condition.niceness)
    if condition.umask >= 0:
        os.umask(condition.umask)


@contextlib.contextmanager
def _directory(condition: Condition) -> Iterator[Path]:
    """With the copy in it, all of it the user's own."""
    above = Path(tempfile.mkdtemp(prefix="conditions-", dir="/tmp"))
    directory = above / condition.name
    try:
        shutil.copytree(ROOT, directory / "clone", ignore=shutil.ignore_patterns(*_NOT_COPIED), symlinks=True)
        for name in ("tmp", "home"):
            (directory / name).mkdir()
        if condition.user is not None and os.geteuid() == 0:
            for path in (above, *above.rglob("*")):
                os.chown(path, condition.user, condition.user, follow_symlinks=False)
        if condition.home == "read-only":
            (directory / "home").chmod(0o555)
        yield directory
    finally:
        shutil.rmtree(above, ignore_errors=True)


def _environment(condition: Condition, directory: Path) -> dict[str, str]:
    given: dict[str, str | None] = {
        **os.environ,
        "HOME": None if condition.home == "missing" else str(directory / "home"),
        "TMPDIR": str(directory / "tmp"),
        "PYTHONPATH": str(directory / "clone" / "src"),
        **condition.variables,
    }
    if condition.user is not None:
        given |= dict.fromkeys(("USER", "LOGNAME", "USERNAME", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR"))
    return {name: value for name, value in given.items() if value is not None}


def _locales() -> set[str]:
    if shutil.which("locale") is None:
        return {"C"}
    return {"C", *subprocess.run(["locale", "-a"], capture_output=True, text=True, errors="replace").stdout.split()}


# Mounts of its own: what the interpreter needs of directories that are root's alone stands in open ones of the same
# name. Arguments: how many such directories, they, the paths needed below them, --, the command.
_OPENED = """
set -e
asked=$(umask); umask 022
closed=$1; shift
stash=$(mktemp -d)
mount -t tmpfs none "$stash"
count=0
for path; do
    [ "$path" = -- ] && break
    count=$((count + 1)); mkdir "$stash/$count"; mount --bind "$path" "$stash/$count"
done
mount -t tmpfs -o mode=755 none "$closed"
count=0
while [ "$1" != -- ]; do
    count=$((count + 1)); mkdir -p "$1"; mount --bind "$stash/$count" "$1"; shift
done
shift
umask "$asked"
exec "$@"
"""


def as_user(user: int) -> list[str]:
    """What goes before a command to run it as ``user``, who can start this interpreter there."""
    drop = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", "--"]
    if shutil.which("setpriv") is None:
        raise NotHere("there is no setpriv")
    if _starts(drop):
        return drop
    needed = [Path(path) for path in dict.fromkeys((sys.prefix, sys.base_prefix))]
    for closed in {above for path in needed for above in path.parents if not above.stat().st_mode & 0o001}:
        below = [str(path) for path in needed if path.is_relative_to(closed)]
        opened = ["unshare", "--mount", "sh", "-c", _OPENED, "sh", str(closed), *below, "--"]
        if shutil.which("unshare") is not None and _starts([*opened, *drop]):
            return [*opened, *drop]
    raise NotHere(f"{sys.executable} is in a directory that only root can enter")


def _starts(before: Sequence[str]) -> bool:
    """Whether the interpreter starts after ``before``, and starts itself: setpriv gives up root's rights with exec."""
    again = "import subprocess, sys; subprocess.run([sys.executable, '-c', ''], check=True)"
    return subprocess.run([*before, sys.executable, "-c", again], cwd="/", capture_output=True).returncode == 0


@contextlib.contextmanager
def _loops(condition: Condition) -> Iterator[None]:
    """A busy loop on every core."""
    niceness = condition.busy
    count = 0 if niceness is None else len(os.sched_getaffinity(0))
    program = f"import os\nos.nice({niceness})\nwhile os.getppid() == {os.getpid()}:\n    sum(range(10 ** 6))"
    loops = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def main(arguments: Sequence[str]) -> int:
    """The worst exit code of all."""
    names, more = arguments, []
    if "--" in arguments:
        split = arguments.index("--")
        names, more = arguments[:split], list(arguments[split + 1 :])
    if unknown := [name for several in names for name in several.split("+") if name not in CONDITIONS]:
        print(f"{unknown[0]}: not one of {', '.join(CONDITIONS)}", file=sys.stderr)
        return 2
    worst, told = 0, []
    for name in names or CONDITIONS:
        print(f"=== {name}", flush=True)
        begun = time.monotonic()
        try:
            code = run(name, [*_WHOLE, *more]).returncode
            told.append(f"{name}: {'passed' if code == 0 else 'failed'} in {time.monotonic() - begun:.0f} s")
        except NotHere as error:
            code = 0
            told.append(f"{name}: not run, {error}")
        worst = max(worst, abs(code))
    print("\n".join(("", *told)))
    return worst


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
