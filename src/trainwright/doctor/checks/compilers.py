"""Check for working compilers: ``train.compile`` and DeepSpeed build code on the machine."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from trainwright.doctor.checks.check import CheckContext, CheckResult, Finding, Severity
from trainwright.machine.accelerators import installed_build

_SECONDS = 30.0
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


def check(context: CheckContext) -> CheckResult:
    """Compile a small library, and find the other programs."""
    facts: list[str] = []
    findings: list[Finding] = []
    compiler = context.variables.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        findings.append(_warning("there is no C++ compiler", "apt-get install g++ (or conda install cxx-compiler)"))
    else:
        problem = _compile(compiler, context.work)
        facts.append(f"{compiler} {_version([compiler, '--version'])}".rstrip())
        findings += [] if problem is None else [problem]
    if shutil.which("ninja") is None:
        findings.append(_warning("ninja is not in PATH", "pip install ninja, with the environment's bin in PATH"))
    if context.machine.gpus:
        findings += _of_cuda(facts)
    return CheckResult(tuple(facts), tuple(findings))


def _compile(compiler: str, work: Path) -> Finding | None:
    source, library = work / "compiled.cpp", work / "compiled.so"
    source.write_text(_PROGRAM, encoding="utf-8")
    headers = sysconfig.get_paths()["include"]
    command = [*compiler.split(), "-shared", "-fPIC", "-fopenmp", f"-I{headers}", str(source), "-o", str(library)]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        return _warning(f"{compiler} does not work: {error}", "reinstall it: apt-get install --reinstall g++")
    if ended.returncode == 0:
        return None
    line = next((line for line in ended.stderr.splitlines() if "error" in line.lower()), ended.stderr.strip()[:200])
    if "Python.h" in line:
        return _warning(
            f"Python's headers are not in {headers}", "apt-get install python3-dev (of this Python's version)"
        )
    if re.search(r"\bomp\.h|openmp|-lg?omp", line):
        return _warning(f"{compiler} has no OpenMP", "apt-get install g++ (or libomp-dev for clang++)")
    return _warning(f"{compiler} cannot compile: {line}", "reinstall it: apt-get install --reinstall g++")


def _of_cuda(facts: list[str]) -> Iterator[Finding]:
    required = installed_build().cuda
    nvcc = shutil.which("nvcc") or _existing(os.path.join(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin/nvcc"))
    if nvcc is None:
        yield Finding(
            Severity.NOTE,
            "there is no nvcc",
            "only extensions that are built on this machine need it, such as DeepSpeed's fused optimizers",
            f"install the CUDA toolkit {required} if you use one of them",
        )
        return
    match = re.search(r"release (\d+)\.", _version([nvcc, "--version"]))
    facts.append(f"{nvcc}, CUDA {match[1] if match else 'unknown'}")
    if required is not None and match is not None and match[1] != required.partition(".")[0]:
        yield _warning(
            f"nvcc is of CUDA {match[1]}, and torch of CUDA {required}",
            f"install the CUDA toolkit {required} and set CUDA_HOME to it, or torch for CUDA {match[1]}",
        )


def _existing(path: str) -> str | None:
    return path if os.path.exists(path) else None


def _version(command: list[str]) -> str:
    try:
        ended = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    match = re.search(r"release \d+\.\d+|\d+\.\d+(?:\.\d+)?", ended.stdout)
    return match[0] if match else ""


def _warning(what: str, fix: str) -> Finding:
    return Finding(Severity.WARNING, what, _USES, fix)
