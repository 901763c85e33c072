"""Prevent torch's store from resolving the names of the machines it connects to."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta

# An address of this machine that is not in /etc/hosts.
_NAMELESS = "127.83.19.7"


class _ResolverState(ctypes.Structure):
    """The beginning of ``struct __res_state`` (resolver(3))."""

    _fields_ = [
        ("retrans", ctypes.c_int),
        ("retry", ctypes.c_int),
        ("options", ctypes.c_ulong),
        ("nscount", ctypes.c_int),
    ]


def skip_reverse_lookups() -> None:
    """Have torch's stores show addresses in their messages, not names.

    torch looks up a name for the address of every connection, which takes 10 s or more if no DNS server answers, and
    stops doing so in this process once a look-up has failed (torch/csrc/distributed/c10d/socket.cpp). So make one fail
    at once: in a thread whose resolver has no servers to ask. Has no effect where that is impossible.
    """
    if not sys.platform.startswith("linux"):
        return
    thread = threading.Thread(target=_fail_once, name="names")
    with _no_standard_error():  # torch warns of the failure
        thread.start()
        thread.join()


def _fail_once() -> None:
    from torch.distributed import TCPStore

    libc = ctypes.CDLL(None)
    if not hasattr(libc, "__res_state") or not hasattr(libc, "__res_ninit"):  # not glibc
        return
    libc.__res_state.restype = ctypes.c_void_p
    address = libc.__res_state()  # of this thread only
    if not address or libc.__res_ninit(ctypes.c_void_p(address)) != 0:
        return
    _ResolverState.from_address(address).nscount = 0
    with contextlib.suppress(OSError, RuntimeError):
        listener = socket.create_server((_NAMELESS, 0))
        port = listener.getsockname()[1]
        seconds = timedelta(seconds=5)
        TCPStore(_NAMELESS, port, is_master=True, timeout=seconds, wait_for_workers=False,
                 master_listen_fd=listener.detach())  # fmt: skip


@contextlib.contextmanager
def _no_standard_error() -> Iterator[None]:
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
