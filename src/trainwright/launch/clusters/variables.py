"""The variables of this process that another machine needs to run the same."""

from __future__ import annotations

import re
from collections.abc import Mapping

# What decides how a run computes and where it finds its files, by name: a list of what to leave out would let through
# the secrets that nobody thought of. Libraries of kernels and communication have settings only.
_PASSED = re.compile(
    r"(TORCH|TORCHINDUCTOR|PYTORCH|NCCL|GLOO|OMP|MKL|TRITON|UCX|FI|DS)_\w+|"
    r"HF_(HOME|ENDPOINT|ASSETS_CACHE|MODULES_CACHE|DATASETS_(CACHE|OFFLINE)|XET_(CACHE|HIGH_PERFORMANCE)|"
    r"HUB_(CACHE|OFFLINE|DISABLE_XET|DOWNLOAD_TIMEOUT|ETAG_TIMEOUT))|"
    r"TRANSFORMERS_(CACHE|OFFLINE|VERBOSITY)|"
    r"TRAINWRIGHT_(CACHE|MACHINE|QUIET|GRACE_SECONDS|EXIT_CODES|FAULT|FAULT_TRIAL)|"
    r"PATH|PYTHONPATH|LD_LIBRARY_PATH|VIRTUAL_ENV|CONDA_PREFIX|XDG_CACHE_HOME|TMPDIR"
)
_SECRET = re.compile(r"(^|_)(AUTH|CREDENTIALS?|KEY|PASS|PASSWD|PASSWORD|PAT|SECRET|TOKEN)(_|$)")
_LOGIN = re.compile(r"://[^/\s]*@")  # the user and the password in a URL


def captured(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables whose values decide how a run computes and where it finds its files, without secrets."""
    return {
        name: value
        for name, value in sorted(variables.items())
        if _PASSED.fullmatch(name) and not _SECRET.search(name) and not _LOGIN.search(value)
    }
