"""Check that torch is one consistent build that supports this machine's driver and devices, and can be imported."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from typing import Any

from trainwright.doctor.checks.check import CheckContext, CheckResult, Finding, Severity
from trainwright.doctor.diagnosis.explain import explain
from trainwright.machine.accelerators import HIDE, installed_build

_SECONDS = 120.0
_INSTALL = "install one build of torch into an empty environment: https://pytorch.org/get-started/locally"
_CODE = """
import json, torch
cuda = torch.cuda.is_available()
print(json.dumps({
    "version": torch.__version__,
    "file": torch.__file__,
    "cuda": torch.version.cuda,
    "kernels": torch.cuda.get_arch_list() if cuda else [],
    "capabilities": [torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())] if cuda else [],
    "gloo": torch.distributed.is_available() and torch.distributed.is_gloo_available(),
    "nccl": torch.distributed.is_available() and torch.distributed.is_nccl_available(),
}))
"""


def check(context: CheckContext) -> CheckResult:
    """Import torch in a separate process, and compare what it was built for with this machine."""
    findings = [*_mixed(), *_unusable(context.machine.unusable)]
    command = [sys.executable, "-P", "-c", _CODE]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        findings.append(
            Finding(
                Severity.BROKEN,
                f"`import torch` did not end within {_SECONDS:.0f} s",
                "the disk or the network file system of the environment does not answer, or the driver hangs",
                "move the environment to a local disk; look for messages of the driver with dmesg",
            )
        )
        return CheckResult((), tuple(findings))
    if ended.returncode:
        return CheckResult((), (*findings, _not_imported(ended)))
    values = json.loads(ended.stdout.splitlines()[-1])
    findings += _of_build(values, len(context.machine.gpus))
    return CheckResult(tuple(_facts(values)), tuple(findings))


def _mixed() -> Iterator[Finding]:
    """Yield a finding if torch's files and its metadata are of different versions."""
    files = installed_build().version
    try:
        recorded = metadata.version("torch")
    except metadata.PackageNotFoundError:
        recorded = "no version"
    if recorded.partition("+")[0] != files.partition("+")[0]:
        yield Finding(
            Severity.BROKEN,
            f"wrong torch build: its files are of {files}, and its metadata says {recorded}",
            "two builds were installed over each other, or another directory shadows one, so that libraries of both "
            "are mixed",
            f"{_INSTALL} (pip uninstall torch, until it says that there is none, then install it once)",
        )


def _unusable(reasons: tuple[str, ...]) -> Iterator[Finding]:
    for reason in reasons:
        what, separator, fix = reason.rpartition(": ")
        if not separator:
            what, _, fix = reason.partition("; ")
        yield Finding(
            Severity.BROKEN,
            what,
            "training would have to use the CPU instead, so commands stop with an error",
            f"{fix}; or {HIDE}" if fix else HIDE,
        )


def _not_imported(ended: subprocess.CompletedProcess[str]) -> Finding:
    diagnosis = explain(ended.stderr)
    last = next((line for line in reversed(ended.stderr.splitlines()) if line.strip()), "")
    if ended.returncode < 0:
        name = signal.Signals(-ended.returncode).name
        last = f"it crashed with {name}"
    cause = diagnosis.cause
    why = cause.error.cause if cause is not None else "a library is missing, damaged, or built for another system"
    fix = "; ".join(cause.error.fixes) if cause is not None else _INSTALL
    return Finding(Severity.BROKEN, f"wrong torch build: `import torch` fails: {last.strip()}", why, fix)


def _of_build(values: dict[str, Any], gpus: int) -> Iterator[Finding]:
    if gpus and not values["capabilities"]:
        yield Finding(
            Severity.BROKEN,
            f"torch {values['version']} finds none of the {gpus} GPUs that the driver shows",
            "its CUDA cannot be initialized: the driver's library and its kernel module may differ after an update",
            "compare `nvidia-smi` with `cat /proc/driver/nvidia/version`, and restart the machine after an update",
        )
    kernels = {int(match[1]) for name in values["kernels"] if (match := re.match(r"(?:sm|compute)_(\d+)", name))}
    for major, minor in sorted({tuple(each) for each in values["capabilities"]}):
        # Kernels of the same major version run, and intermediate code of any earlier one is compiled.
        if kernels and not any(k // 10 == major and k % 10 <= minor for k in kernels) and not _compiled(values, major):
            yield Finding(
                Severity.BROKEN,
                f"wrong torch build: {values['version']} has no kernels for compute capability {major}.{minor}",
                "the first operation on the GPU fails with `no kernel image is available`",
                f"install a build of torch whose list has sm_{major}{minor}: https://pytorch.org/get-started/locally",
            )
    required = ("nccl",) if gpus > 1 else ("gloo",)
    for name in required:
        if not values[name]:
            yield Finding(
                Severity.BROKEN,
                f"wrong torch build: {values['version']} has no {name}",
                "processes cannot exchange gradients",
                _INSTALL,
            )


def _compiled(values: dict[str, Any], major: int) -> bool:
    return any(name.startswith("compute_") and int(name[8:]) // 10 <= major for name in values["kernels"])


def _facts(values: dict[str, Any]) -> Iterator[str]:
    kind = f"CUDA {values['cuda']}" if values["cuda"] else "CPU"
    yield f"torch {values['version']} for {kind}, in {os.path.dirname(values['file'])}"
    if values["capabilities"]:
        shown = ", ".join(dict.fromkeys(f"{major}.{minor}" for major, minor in values["capabilities"]))
        yield f"{len(values['capabilities'])} GPUs of compute capability {shown}; kernels for {len(values['kernels'])}"
