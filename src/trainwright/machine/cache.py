"""The cache directory, for files that can be recreated, and digests of large files in it."""

from __future__ import annotations

import hashlib
import os
import pwd
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from trainwright.errors import MachineError
from trainwright.utils.paths import write_file


def find_cache_root() -> Path:
    """Return ``$TRAINWRIGHT_CACHE``, or by default ``~/.cache/trainwright``.

    Raises:
        MachineError: the user has no home directory.
    """
    try:
        return Path(os.environ.get("TRAINWRIGHT_CACHE") or "~/.cache/trainwright").expanduser()
    except RuntimeError:  # as in a container that runs under a numeric user id
        raise MachineError("this user has no home directory to keep a cache in; set TRAINWRIGHT_CACHE to one") from None


def keep_compiled_code() -> None:
    """Have torch keep compiled code in the cache, not among temporary files. Call this before importing it."""
    with suppress(MachineError):  # no home directory
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(find_cache_root() / "compiled"))


def try_write(file: Path, content: str | bytes) -> None:
    """Write ``file`` completely or not at all. A cache that cannot be written is not an error."""
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_file(file, content)


@contextmanager
def explain_cache_errors(directory: Path, what: str = "the cache cannot be used in") -> Iterator[None]:
    """Raise MachineError with a remedy if a directory of the cache cannot be read or written."""
    try:
        yield
    except OSError as error:
        raise MachineError(f"{what} {directory}: {_describe_problem(error)}") from error


def _describe_problem(error: OSError) -> str:
    why = error.strerror or str(error)
    if isinstance(error, PermissionError) and error.filename is not None:
        owner = _describe_owner(Path(os.fsdecode(error.filename)))
        return (
            f"{why}: {os.fsdecode(error.filename)}{owner}; set TRAINWRIGHT_CACHE to a directory of your own, or let "
            "your group write there (chmod -R g+rwX, umask 002)"
        )
    return f"{why}; free space there or set TRAINWRIGHT_CACHE to another directory"


def _describe_owner(path: Path) -> str:
    """Return in words who owns the nearest directory that exists, if it is another user."""
    for existing in (path, *path.parents):
        with suppress(OSError):
            owner = existing.stat().st_uid
            if owner == os.geteuid():
                return ""
            with suppress(KeyError):
                return f" (in a directory of {pwd.getpwuid(owner).pw_name})"
            return f" (in a directory of the user {owner})"
    return ""


def look_up_digest(file: Path, models: Path, what: str, make: Callable[[], str]) -> str:
    """Return a digest of the file's content, cached by path, size and time: hashing takes a second per GB."""
    stat = file.stat()
    identity = f"{file.resolve()}\n{stat.st_size}\n{stat.st_mtime_ns}\n{what}"
    memo = models / ".fingerprints" / hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()
    try:
        return memo.read_text(encoding="utf-8")
    except OSError:  # not remembered, or stale
        fingerprint = make()
        try_write(memo, fingerprint)
        return fingerprint


def hash_file(file: Path, name: str) -> str:
    """Return a file's digest by the algorithm of this name."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, name).hexdigest()
