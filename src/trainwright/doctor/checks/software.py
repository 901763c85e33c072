"""Check the software: torch's build and the devices that it supports, packages that fit together, and compilers."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from trainwright.doctor.checks.check import CannotCheck, CheckContext, CheckResult, Finding, Severity
from trainwright.doctor.diagnosis import explain
from trainwright.machine.accelerators import HIDE, read_installed_build

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
    findings = [*_check_mixed(), *_check_unusable(context.machine.unusable)]
    command = [sys.executable, "-P", "-c", _CODE]
    try:
        result = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_SECONDS)
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
    if result.returncode:
        return CheckResult((), (*findings, _describe_failed_import(result)))
    values = json.loads(result.stdout.splitlines()[-1])
    findings += _check_build(values, len(context.machine.gpus))
    return CheckResult(tuple(_describe_torch(values)), tuple(findings))


def _check_mixed() -> Iterator[Finding]:
    """Yield a finding if torch's files and its metadata are of different versions."""
    files = read_installed_build().version
    try:
        metadata_version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        metadata_version = "no version"
    if metadata_version.partition("+")[0] != files.partition("+")[0]:
        yield Finding(
            Severity.BROKEN,
            f"wrong torch build: its files are of {files}, and its metadata says {metadata_version}",
            "two builds were installed over each other, or another directory shadows one, so that libraries of both "
            "are mixed",
            f"{_INSTALL} (pip uninstall torch, until it says that there is none, then install it once)",
        )


def _check_unusable(reasons: tuple[str, ...]) -> Iterator[Finding]:
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


def _describe_failed_import(ended: subprocess.CompletedProcess[str]) -> Finding:
    diagnosis = explain(ended.stderr)
    last = next((line for line in reversed(ended.stderr.splitlines()) if line.strip()), "")
    if ended.returncode < 0:
        name = signal.Signals(-ended.returncode).name
        last = f"it crashed with {name}"
    cause = diagnosis.cause
    why = cause.error.cause if cause is not None else "a library is missing, damaged, or built for another system"
    fix = "; ".join(cause.error.fixes) if cause is not None else _INSTALL
    return Finding(Severity.BROKEN, f"wrong torch build: `import torch` fails: {last.strip()}", why, fix)


def _check_build(values: dict[str, Any], gpus: int) -> Iterator[Finding]:
    if gpus and not values["capabilities"]:
        what = f"torch {values['version']} finds none of the {gpus} GPUs that the driver shows"
        why = "its CUDA cannot be initialized: the driver's library and its kernel module may differ after an update"
        fix = "compare `nvidia-smi` with `cat /proc/driver/nvidia/version`, and restart the machine after an update"
        yield Finding(Severity.BROKEN, what, why, fix)
    kernels = {int(match[1]) for name in values["kernels"] if (match := re.match(r"(?:sm|compute)_(\d+)", name))}
    for major, minor in sorted({tuple(capability) for capability in values["capabilities"]}):
        # Kernels of the same major version run, and intermediate code of any earlier one is compiled.
        if (
            kernels
            and not any(k // 10 == major and k % 10 <= minor for k in kernels)
            and not any(name.startswith("compute_") and int(name[8:]) // 10 <= major for name in values["kernels"])
        ):
            what = f"wrong torch build: {values['version']} has no kernels for compute capability {major}.{minor}"
            why = "the first operation on the GPU fails with `no kernel image is available`"
            fix = f"install a build of torch whose list has sm_{major}{minor}: https://pytorch.org/get-started/locally"
            yield Finding(Severity.BROKEN, what, why, fix)
    backends = ("nccl",) if gpus > 1 else ("gloo",)
    for name in backends:
        if not values[name]:
            what = f"wrong torch build: {values['version']} has no {name}"
            why = "processes cannot exchange gradients"
            yield Finding(Severity.BROKEN, what, why, _INSTALL)


def _describe_torch(values: dict[str, Any]) -> Iterator[str]:
    kind = f"CUDA {values['cuda']}" if values["cuda"] else "CPU"
    yield f"torch {values['version']} for {kind}, in {os.path.dirname(values['file'])}"
    if values["capabilities"]:
        text = ", ".join(dict.fromkeys(f"{major}.{minor}" for major, minor in values["capabilities"]))
        yield f"{len(values['capabilities'])} GPUs of compute capability {text}; kernels for {len(values['kernels'])}"


_PIP_SECONDS = 60.0
_DIFFERS = re.compile(
    r"^(?P<of>\S+) \S+ has requirement (?P<wanted>.+), but you have (?P<name>\S+) (?P<version>\S+)\.$"
)
_MISSING = re.compile(r"^(?P<of>\S+) \S+ requires (?P<wanted>\S+), which is not installed\.$")
_SHOWN = ("torch", "transformers", "accelerate", "deepspeed", "peft", "bitsandbytes", "triton", "flash-attn")
_OWN = "trainwright"


def check_packages(context: CheckContext) -> CheckResult:
    """Report every requirement of an installed package that is not met."""
    command = [sys.executable, "-P", "-m", "pip", "--disable-pip-version-check", "check"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=_PIP_SECONDS, errors="replace")
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotCheck(f"pip check: {error}") from None
    if "No module named pip" in result.stderr:
        raise CannotCheck("pip is not installed in this environment; `uv pip check` does the same")
    return CheckResult((", ".join(_list_versions()),), tuple(_check_requirements(result.stdout)))


def _list_versions() -> Iterator[str]:
    yield f"Python {sys.version.split()[0]}"
    for name in _SHOWN:
        try:
            yield f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            continue


def _check_requirements(output: str) -> Iterator[Finding]:
    ours = _list_used_packages()
    for line in output.splitlines():
        match = _DIFFERS.match(line) or _MISSING.match(line)
        if match is None or match["of"].lower() not in ours:
            continue  # not used in training
        severity = Severity.BROKEN if match["of"] == _OWN else Severity.WARNING
        has = f"{match['name']} {match['version']} is" if "name" in match.re.groupindex else "it is not"
        yield Finding(
            severity,
            f"{match['of']} needs {match['wanted']}, and {has} installed",
            "code that was written for another version may fail, sometimes in the middle of a run",
            f"pip install '{match['wanted']}'"
            if match["of"] == _OWN
            else f"pip install --upgrade {match['of']}, or pip install '{match['wanted']}' if no newer version fits",
        )


def _list_used_packages() -> set[str]:
    """Return the names of the packages that Trainwright uses if they are installed, and what these require."""
    names, pending = set[str](), [_OWN]
    while pending:
        name = pending.pop()
        if name in names:
            continue
        names.add(name)
        try:
            requirements = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        if name != _OWN:  # extras of others are not ours
            requirements = [text for text in requirements if "extra ==" not in text]
        pending += [match[0].lower() for text in requirements if (match := re.match(r"[\w.-]+", text))]
    return names


_COMPILE_SECONDS = 30.0
# Code that torch.compile generates for a CPU uses OpenMP threads and Python's headers.
_PROGRAM = """
#include <Python.h>
#include <omp.h>
#include <cmath>
extern "C" double total(const double* x, long n) {
    double s = 0;
    #pragma omp parallel for reduction(+ : s)
    for (long i = 0; i < n; ++i) s += std::sqrt(x[i]);
    return s + 0 * omp_get_max_threads();
}
"""
_USES = (
    "train.compile: true and DeepSpeed's strategies (zero1 to zero3) compile code on this machine, and fail without it"
)


def check_compilers(context: CheckContext) -> CheckResult:
    """Compile a small library, and find the other programs."""
    facts: list[str] = []
    findings: list[Finding] = []
    compiler = context.variables.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        fix = "apt-get install g++ (or conda install cxx-compiler)"
        findings.append(_build_warning("there is no C++ compiler", fix))
    else:
        problem = _check_compiler(compiler, context.work)
        facts.append(f"{compiler} {_read_version([compiler, '--version'])}".rstrip())
        findings += [] if problem is None else [problem]
    if shutil.which("ninja") is None:
        findings.append(_build_warning("ninja is not in PATH", "pip install ninja, with the environment's bin in PATH"))
    if context.machine.gpus:
        findings += _check_cuda(facts)
    return CheckResult(tuple(facts), tuple(findings))


def _check_compiler(compiler: str, work: Path) -> Finding | None:
    source, library = work / "compiled.cpp", work / "compiled.so"
    source.write_text(_PROGRAM, encoding="utf-8")
    headers = sysconfig.get_paths()["include"]
    command = [*compiler.split(), "-shared", "-fPIC", "-fopenmp", f"-I{headers}", str(source), "-o", str(library)]
    try:
        result = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_COMPILE_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        return _build_warning(f"{compiler} does not work: {error}", "reinstall it: apt-get install --reinstall g++")
    if result.returncode == 0:
        return None
    line = next((line for line in result.stderr.splitlines() if "error" in line.lower()), result.stderr.strip()[:200])
    if "Python.h" in line:
        return _build_warning(
            f"Python's headers are not in {headers}", "apt-get install python3-dev (of this Python's version)"
        )
    if re.search(r"\bomp\.h|openmp|-lg?omp", line):
        return _build_warning(f"{compiler} has no OpenMP", "apt-get install g++ (or libomp-dev for clang++)")
    return _build_warning(f"{compiler} cannot compile: {line}", "reinstall it: apt-get install --reinstall g++")


def _check_cuda(facts: list[str]) -> Iterator[Finding]:
    version = read_installed_build().cuda
    default = os.path.join(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin/nvcc")
    nvcc = shutil.which("nvcc") or (default if os.path.exists(default) else None)
    if nvcc is None:
        what = "there is no nvcc"
        why = "only extensions that are built on this machine need it, such as DeepSpeed's fused optimizers"
        fix = f"install the CUDA toolkit {version} if you use one of them"
        yield Finding(Severity.NOTE, what, why, fix)
        return
    match = re.search(r"release (\d+)\.", _read_version([nvcc, "--version"]))
    facts.append(f"{nvcc}, CUDA {match[1] if match else 'unknown'}")
    if version is not None and match is not None and match[1] != version.partition(".")[0]:
        yield _build_warning(
            f"nvcc is of CUDA {match[1]}, and torch of CUDA {version}",
            f"install the CUDA toolkit {version} and set CUDA_HOME to it, or torch for CUDA {match[1]}",
        )


def _read_version(command: list[str]) -> str:
    try:
        result = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_COMPILE_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    match = re.search(r"release \d+\.\d+|\d+\.\d+(?:\.\d+)?", result.stdout)
    return match[0] if match else ""


def _build_warning(what: str, fix: str) -> Finding:
    return Finding(Severity.WARNING, what, _USES, fix)
