"""Servers of the protocols of S3 and of Google Cloud Storage on this machine, each in a process of its own."""

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
_SERVE_GOOGLE = (
    "import socket, threading; from gcp_storage_emulator.server import create_server; "
    "probe = socket.create_server(('127.0.0.1', 0)); port = probe.getsockname()[1]; probe.close(); "
    "server = create_server('127.0.0.1', port, in_memory=True); server.start(); "
    "print(port, flush=True); threading.Event().wait()"
)
KEYS = {"AWS_ACCESS_KEY_ID": "one-key", "AWS_SECRET_ACCESS_KEY": "kept-out-of-runs", "AWS_DEFAULT_REGION": "us-east-1"}


@dataclass(frozen=True)
class ObjectStore:
    """A running server of the protocol of S3."""

    address: str
    scheme = "s3"
    hidden = (KEYS["AWS_ACCESS_KEY_ID"], KEYS["AWS_SECRET_ACCESS_KEY"])  # what no file of a run may have

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


@dataclass(frozen=True)
class GoogleStore:
    """A running server of the protocol of Google Cloud Storage; it asks for no keys."""

    address: str
    scheme = "gs"
    hidden = ()

    @property
    def variables(self) -> dict[str, str]:
        """What a process needs to use it."""
        # Kinds of buckets are asked for over gRPC, which the server does not have.
        plain = {"GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"}
        return {"STORAGE_EMULATOR_HOST": self.address, "GOOGLE_CLOUD_PROJECT": "tests", **plain}

    def files(self) -> Any:
        """The file system of fsspec on it, with no cache of what it holds."""
        from gcsfs.core import GCSFileSystem

        options = {"use_listings_cache": False, "skip_instance_cache": True}
        return GCSFileSystem(project="tests", endpoint_url=self.address, token="anon", **options)


@contextlib.contextmanager
def _served(code: str, **variables: str) -> Iterator[str]:
    """Start a server that prints its port, and end it afterwards; yield its address."""
    command = [sys.executable, "-c", code]
    server = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env={**os.environ, **variables}
    )
    try:
        assert server.stdout is not None
        yield f"http://127.0.0.1:{int(server.stdout.readline())}"
    finally:
        server.kill()
        server.wait()


@contextlib.contextmanager
def object_store() -> Iterator[ObjectStore]:
    """Start a server of the protocol of S3."""
    with _served(_SERVE, **KEYS) as address:
        for _ in range(100):
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{address}/moto-api/data.json", timeout=5).close()
                break
            time.sleep(0.1)
        yield ObjectStore(address)


@contextlib.contextmanager
def google_store() -> Iterator[GoogleStore]:
    """Start a server of the protocol of Google Cloud Storage."""
    with _served(_SERVE_GOOGLE) as address:
        yield GoogleStore(address)
