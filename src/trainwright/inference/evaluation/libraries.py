"""Optional libraries of evaluation, and the message if one is missing."""

from __future__ import annotations

from importlib.util import find_spec

from trainwright.errors import MachineError
from trainwright.utils.installation import install_command

# By module name: the package, and our extra that installs it.
_PACKAGES = {
    "rouge_score": ("rouge-score", "evaluation"),
    "jsonschema": ("jsonschema", "evaluation"),
    "scipy": ("scipy", "evaluation"),
    "bitsandbytes": ("bitsandbytes", "quantization"),
    "matplotlib": ("matplotlib", "charts"),
    "lm_eval": ("lm-eval", "lm-eval"),
}


def require(module: str, what: str) -> None:
    """Raise MachineError if ``module``, which ``what`` needs, is not installed."""
    if find_spec(module) is None:
        package, extra = _PACKAGES[module]
        raise MachineError(f"{what} needs {package}, which is not installed; {install_command(extra)}")
