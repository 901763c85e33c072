"""A server of the protocol of S3 on this machine, in a process of its own."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_SERVE = (
    "import sys; from werkzeug.serving import make_server; from moto.server import DomainDispatcherApplication, "
    "create_backend_app; "
    "server = make_server('127.0.0.1', 0, DomainDispatcherApplication(create_backend_app), threaded=True); "
    "print(server.server_port, flush=True); server.serve_forever()"
)
KEYS = {"AWS_ACCESS_KEY_ID": "one-key", "AWS_SECRET_ACCESS_KEY": "kept-out-of-runs", "AWS_DEFAULT_REGION": "us-east-1"}


@dataclass(frozen=True)
class ObjectStore:
    """A running server."""

    address: str

    @property
    def variables(self) -> dict[str, str]:
        """What a process needs to use it."""
        return {**KEYS, "AWS_ENDPOINT_URL": self.address}

    def files(self) -> Any:
        """The file system of fsspec on it, with no cache of what it holds."""
        import s3fs

        return s3fs.S3FileSystem(
            key=KEYS["AWS_ACCESS_KEY_ID"],
            secret=KEYS["AWS_SECRET_ACCESS_KEY"],
            client_kwargs={"endpoint_url": self.address},
            use_listings_cache=False,
            skip_instance_cache=True,
        )

    def refuse_keys(self) -> None:
        """Refuse every request with keys that no user of it has, from now on."""
        address, plain = f"{self.address}/moto-api/reset-auth", {"Content-Type": "text/plain"}
        urllib.request.urlopen(urllib.request.Request(address, b"0", plain), timeout=10).close()


@contextlib.contextmanager
def object_store() -> Iterator[ObjectStore]:
    """Start a server, and end it afterwards."""
    command = [sys.executable, "-c", _SERVE]
    server = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env={**os.environ, **KEYS}
    )
    try:
        assert server.stdout is not None
        store = ObjectStore(f"http://127.0.0.1:{int(server.stdout.readline())}")
        for _ in range(100):
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{store.address}/moto-api/data.json", timeout=5).close()
                break
            time.sleep(0.1)
        yield store
    finally:
        server.kill()
        server.wait()
