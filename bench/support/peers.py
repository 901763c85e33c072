"""Virtual environments of the peers, made on demand from pinned requirements and kept in the cache."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import venv
from pathlib import Path

REQUIREMENTS = Path(__file__).parents[1] / "peers"


def peer_python(peer: str) -> Path:
    """The interpreter of the peer's environment, which is made again whenever ``peers/<peer>.txt`` changes.

    Raises:
        subprocess.CalledProcessError: pip failed; its own words are on the terminal.
    """
    requirements = REQUIREMENTS / f"{peer}.txt"
    digest = hashlib.sha256(requirements.read_bytes()).hexdigest()
    directory = cache_directory() / "bench-venvs" / f"{peer}-{digest[:8]}"
    python = directory / "bin" / "python"
    complete = directory / "complete"
    if complete.exists():
        return python
    print(f"Making {peer}'s environment in {directory} (some minutes)", flush=True)
    shutil.rmtree(directory, ignore_errors=True)
    venv.create(directory, with_pip=True)
    subprocess.run([python, "-m", "pip", "install", "--quiet", "-r", requirements], check=True)
    complete.touch()
    return python


def cache_directory() -> Path:
    """Where the benches keep what is costly to make."""
    chosen = os.environ.get("TRAINWRIGHT_CACHE")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "trainwright"
