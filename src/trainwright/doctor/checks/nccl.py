"""Check the variables that change NCCL, Gloo and torch's process groups, and say what each that is set does."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

from trainwright.doctor.checks.check import CheckContext, CheckResult, Finding, Severity

# Variable, pattern of its values, and why such a value is a problem.
_COSTLY = (
    ("NCCL_P2P_DISABLE", "1", "GPUs of a node exchange through the host's memory, which is several times slower"),
    ("NCCL_SHM_DISABLE", "1", "GPUs that cannot reach each other directly exchange through the network"),
    ("NCCL_IB_DISABLE", "1", "nodes exchange through sockets, even with InfiniBand"),
    ("NCCL_DEBUG", "(?i)trace", "every call is printed, which slows steps and fills disks"),
    ("NCCL_CHECK_POINTERS", "1", "every call checks its pointers"),
    ("NCCL_ALGO", ".+", "NCCL cannot choose the fastest algorithm for each size"),
    ("NCCL_PROTO", ".+", "NCCL cannot choose the fastest protocol for each size"),
    ("NCCL_MAX_NCHANNELS", "[1-3]", "too few channels to reach the speed of the links"),
    ("TORCH_NCCL_NAN_CHECK", "1", "every tensor is searched for NaN before it is exchanged"),
    ("TORCH_NCCL_BLOCKING_WAIT", "1", "the host waits for every collective"),
    ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0", "a failed collective hangs until someone ends the run"),
    ("TORCH_DISTRIBUTED_DEBUG", "(?i)detail", "every collective is compared between ranks first"),
    ("CUDA_LAUNCH_BLOCKING", "1", "the host waits for every kernel"),
)
_OURS = re.compile(
    r"(?:TORCH_)?NCCL_\w+|(?:GLOO|TP|TORCH_FR|TORCH_GLOO)_\w+|TORCH_DISTRIBUTED_DEBUG|TORCH_CPP_LOG_LEVEL|CUDA_\w+|PYTORCH_\w*ALLOC_CONF|OMP_NUM_THREADS"
)
_FILES = ("/etc/nccl.conf", "~/.nccl.conf")


def check(context: CheckContext) -> CheckResult:
    """Explain every variable that is set, in the environment or in NCCL's files."""
    settings = dict(_read_configuration_files(context.variables))
    settings |= {name: (value, "") for name, value in context.variables.items() if _OURS.fullmatch(name)}
    known_settings = {name: origin for name, origin in settings.items() if name in EFFECTS}
    facts = [f"{name}={value}{origin}: {EFFECTS[name]}" for name, (value, origin) in sorted(known_settings.items())]
    findings = (*_check_unknown(settings), *_check_costly(settings))
    return CheckResult(tuple(facts) or ("none is set",), findings)


def _read_configuration_files(variables: Mapping[str, str]) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield the variables of NCCL's configuration files, which the environment overrides."""
    file = variables.get("NCCL_CONF_FILE")
    for name in (_FILES[0], file or _FILES[1]):
        try:
            text = Path(name).expanduser().read_text(encoding="utf-8", errors="replace")
        except (OSError, RuntimeError):
            continue
        for line in text.splitlines():
            variable, equals, value = line.partition("#")[0].strip().partition("=")
            if equals:
                yield variable.strip(), (value.strip(), f" (in {name})")


def _check_unknown(settings: Mapping[str, tuple[str, str]]) -> Iterator[Finding]:
    for name, (value, origin) in sorted(settings.items()):
        if name in EFFECTS or not name.startswith(("NCCL_", "TORCH_NCCL_", "GLOO_")):
            continue
        if name in OLD_NAMES:
            why = "torch reads the new name, and may ignore the old one"
            what = f"{name}={value}{origin} is an old name"
            yield Finding(Severity.WARNING, what, why, f"set {OLD_NAMES[name]} instead")
            continue
        near = difflib.get_close_matches(name, EFFECTS, n=1, cutoff=0.8)
        hint = f"did you mean {near[0]}?" if near else f"look it up in NCCL's user guide, or unset {name}"
        why = "NCCL ignores variables that it does not know, without a message"
        yield Finding(Severity.WARNING, f"{name}={value}{origin} is not a documented variable", why, hint)


def _check_costly(settings: Mapping[str, tuple[str, str]]) -> Iterator[Finding]:
    for name, pattern, why in _COSTLY:
        value, origin = settings.get(name, ("", ""))
        if value and re.fullmatch(pattern, value.strip()):
            action = f"remove it from {origin[5:-1]}" if origin else f"unset {name}"
            what = f"{name}={value}{origin} slows training or hides failures"
            fix = f"{action}, unless it is a workaround for a known problem"
            yield Finding(Severity.WARNING, what, why, fix)


EFFECTS: dict[str, str] = tomllib.loads(Path(__file__).with_name("nccl_variables.toml").read_text(encoding="utf-8"))
# Names that torch read before 2.2, and the new ones.
OLD_NAMES = {
    f"NCCL_{name}": f"TORCH_NCCL_{name}"
    for name in (
        *("ASYNC_ERROR_HANDLING", "BLOCKING_WAIT", "DESYNC_DEBUG", "ENABLE_TIMING", "AVOID_RECORD_STREAMS"),
        "USE_TENSOR_REGISTER_ALLOCATOR_HOOK",
    )
}
