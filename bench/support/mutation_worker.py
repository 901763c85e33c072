"""Runs pytest in forks of a process that has imported the libraries already, which takes longer than most tests do.

A line on standard input is JSON: the arguments of pytest, and the file for its output. Answered are the pid, and when
it has ended its exit code.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from contextlib import suppress

_LIBRARIES = (
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.generation.utils",
    "peft",
    "datasets",
    "safetensors.torch",
    "pydantic",
    "psutil",
    "pytest",
)


def main() -> None:
    sys.path.remove(os.path.dirname(os.path.abspath(__file__)))
    if not os.path.exists("/dev/nvidiactl"):  # as tests/conftest.py; Triton reads it when torch imports it
        os.environ["TRITON_INTERPRET"] = "1"
    for name in _LIBRARIES:
        with suppress(ImportError):  # tests that need one that is not there are left out
            importlib.import_module(name)
    for line in sys.stdin:
        arguments, output = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _child(arguments, output)
        print(pid, flush=True)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _child(arguments: list[str], output: str) -> None:
    import pytest

    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    code = 3
    try:
        code = int(pytest.main(arguments))
    finally:
        sys.stdout.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
