"""One run of TRL as a whole process, in its own environment."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from support.peers import peer_python
from support.processes import run_measured
from support.runs import Run

SCRIPT = Path(__file__).parents[1] / "peers" / "trl_sft.py"

# The fastest settings found that train the same, but for `bf16`; bench/README.md lists those tried.
BEST: dict[str, Any] = {
    "packing": True,
    "packing_strategy": "bfd",
    "max_length": 1024,
    "per_device_train_batch_size": 1,
    "optim": "adamw_torch_fused",
    "activation_checkpointing": False,
    "report_to": "none",
    "logging_strategy": "no",
    "save_strategy": "no",
    "disable_tqdm": True,
}
# SFTConfig() as it comes, but for writing a checkpoint at the end, which would only cost memory.
DEFAULTS: dict[str, Any] = {"report_to": "none", "save_strategy": "no"}


def run_trl(
    contender: str,
    pair: int,
    settings: Mapping[str, Any],
    *,
    model: Path,
    rows: Path,
    steps: int,
    env: Mapping[str, str],
    work: Path,
) -> Run:
    """Train ``steps`` optimizer steps with ``settings`` (arguments of SFTConfig); files go under ``work``.

    Raises:
        SystemExit: the run failed; says where its output is.
    """
    directory = work / f"{contender}-{pair}"
    directory.mkdir(parents=True)
    result, log = directory / "result.json", directory / "log"
    job = {
        "model": str(model),
        "rows": str(rows),
        "steps": steps,
        "threads": int(env["OMP_NUM_THREADS"]),
        "settings": dict(settings),
        "output_directory": str(directory / "output"),
        "result": str(result),
    }
    (directory / "job.json").write_text(json.dumps(job))
    # Nothing is fetched; the prepared rows are kept for the next run, as preparation is not what is measured.
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(work / "datasets")}
    command = [str(peer_python("trl")), str(SCRIPT), str(directory / "job.json")]
    usage = run_measured(command, env={**env, **offline}, log=log)
    if usage.exit_code != 0:
        raise SystemExit(f"{contender} ended with exit code {usage.exit_code}; its output is in {log}")
    measured = json.loads(result.read_text())
    return Run(
        contender=contender,
        pair=pair,
        step_ends=measured["step_ends"],
        tokens=measured["tokens"],
        targets=measured["targets"],
        losses=measured["losses"],
        settings=measured["settings"] | {"versions": measured["versions"]},
        usage=usage,
    )
