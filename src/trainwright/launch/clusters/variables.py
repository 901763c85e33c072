"""The variables of this process that another machine needs to run the same."""

from __future__ import annotations

import re
from collections.abc import Mapping

# Variables whose values decide how a run computes and where it finds its files. Secrets are not written.
_CAPTURED = re.compile(
    r"(TRAINWRIGHT|HF|TRANSFORMERS|TORCH|TORCHINDUCTOR|PYTORCH|NCCL|GLOO|OMP|MKL|TRITON|UCX|FI|DS)_\w+|"
    r"PATH|PYTHONPATH|LD_LIBRARY_PATH|VIRTUAL_ENV|CONDA_PREFIX|XDG_CACHE_HOME|TMPDIR"
)
_SECRET = re.compile(r"(^|_)(TOKEN|KEY|SECRET|PASSWORD)(_|$)")


def captured(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables whose values decide how a run computes and where it finds its files, without secrets."""
    names = sorted(name for name in variables if _CAPTURED.fullmatch(name) and not _SECRET.search(name))
    return {name: variables[name] for name in names}
