"""Write a new Accelerate file: answers suggested for this machine, and the keys that express them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainwright.compatibility.accelerate.machine import choose_processes
from trainwright.errors import RequestError
from trainwright.machine.machine import Machine
from trainwright.parallel.zero.spec import count_sharded_parts
from trainwright.recipe.registries import STRATEGIES
from trainwright.recipe.strategy_spec import StrategySpec, load_strategies, look_up_strategy
from trainwright.recipe.yaml_text import to_yaml
from trainwright.utils.paths import write_file

_HEADER = "# Written by `trainwright setup`; `trainwright setup --show` shows its effect on this machine.\n"


@dataclass(frozen=True)
class Answers:
    """The wizard's answers.

    ``processes`` counts those of all machines; ``gpu_ids`` are those of this one, such as ``0,1``, None for all.
    ``wrap`` names classes, separated by commas; None: the model's blocks. With a ``deepspeed_file`` the stage, offload
    and precision are what it says. None of the recipe's own numbers: the recipe's.
    """

    device: str  # gpu or cpu
    machines: int
    machine_rank: int
    main_ip: str | None
    main_port: int | None
    processes: int
    strategy: str  # one of `list_offered_strategies`
    offload: bool
    precision: str
    gpu_ids: str | None = None
    compiled: bool = False
    reshard: bool = True
    wrap: str | None = None
    recompute: bool = False
    deepspeed_file: str | None = None
    accumulation: int | None = None
    max_grad_norm: float | None = None


def suggest_answers(machine: Machine) -> Answers:
    """Return answers that use all of this machine."""
    return Answers(
        device="gpu" if machine.gpus else "cpu",
        machines=1,
        machine_rank=0,
        main_ip=None,
        main_port=None,
        processes=choose_processes(machine),
        strategy="ddp",
        offload=False,
        precision="bf16" if machine.has_bf16 else "no",
    )


def list_offered_strategies() -> dict[str, StrategySpec]:
    """Return the strategies that a file can set, by name: built-in ones for several processes."""
    specs = load_strategies().items()
    return {name: spec for name, spec in specs if STRATEGIES.package(name) is None and not spec.is_one_process}


def build_values(answers: Answers) -> dict[str, Any]:
    """Return the file's keys, in the order and the spelling of Accelerate's own wizard."""
    values: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "distributed_type": _choose_distributed_type(answers),
        "downcast_bf16": "no",
        "enable_cpu_affinity": False,
        "machine_rank": answers.machine_rank,
        "main_training_function": "main",
        "mixed_precision": answers.precision,
        "num_machines": answers.machines,
        "num_processes": answers.processes,
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": answers.device == "cpu",
    }
    if answers.device == "gpu":
        values["gpu_ids"] = answers.gpu_ids or "all"
    if answers.compiled:
        values["dynamo_config"] = {"dynamo_backend": "INDUCTOR"}
    if answers.machines > 1:
        values["main_process_ip"] = answers.main_ip
        values["main_process_port"] = answers.main_port
    if values["distributed_type"] == "FSDP":
        values["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": answers.reshard,
            "fsdp_offload_params": answers.offload,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_cpu_ram_efficient_loading": True,
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            "fsdp_activation_checkpointing": answers.recompute,
        }
        if answers.wrap is not None:
            values["fsdp_config"]["fsdp_transformer_layer_cls_to_wrap"] = answers.wrap
    if values["distributed_type"] == "DEEPSPEED":
        values["deepspeed_config"] = _build_deepspeed_values(answers)
        if answers.deepspeed_file is not None:
            del values["mixed_precision"]  # Accelerate takes it from one of the files, and refuses both
    return dict(sorted(values.items()))


def write(path: Path, values: dict[str, Any], *, replace: bool) -> Path | None:
    """Write the file, completely or not at all; as JSON if its name ends in .json, as Accelerate expects.

    With ``replace``, an existing file is kept under the name returned (default_config.yaml.bak, .bak2, …). Raises
    RequestError if it exists and ``replace`` is not set, or if the path is not writable.
    """
    text = json.dumps(values, indent=2) + "\n" if path.suffix == ".json" else _HEADER + to_yaml(values)
    backup = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            if not replace:
                raise RequestError(f"{path}: already exists and was not replaced")
            if path.read_text(encoding="utf-8", errors="replace") == text:
                return None
            backup = _find_free_path(path)
            path.rename(backup)
        write_file(path, text)
    except OSError as error:
        raise RequestError(f"{path}: cannot be written: {error.strerror}") from None
    return backup


def _choose_distributed_type(answers: Answers) -> str:
    if (kind := look_up_strategy(answers.strategy).accelerate_type) is not None:
        return kind
    if answers.processes == 1:
        return "NO"
    return "MULTI_CPU" if answers.device == "cpu" else "MULTI_GPU"


def _build_deepspeed_values(answers: Answers) -> dict[str, Any]:
    if answers.deepspeed_file is not None:
        return {"deepspeed_config_file": answers.deepspeed_file, "deepspeed_multinode_launcher": "standard"}
    stage = count_sharded_parts(look_up_strategy(answers.strategy))
    device = "cpu" if answers.offload else "none"
    numbers = {"gradient_accumulation_steps": answers.accumulation, "gradient_clipping": answers.max_grad_norm}
    return {
        **{key: value for key, value in numbers.items() if value is not None},
        "deepspeed_multinode_launcher": "standard",
        "offload_optimizer_device": device,
        "offload_param_device": device if stage == 3 else "none",
        "zero3_init_flag": stage == 3,
        "zero3_save_16bit_model": stage == 3,
        "zero_stage": stage,
    }


def _find_free_path(path: Path) -> Path:
    candidates = (path.with_name(f"{path.name}.bak{n}" if n > 1 else f"{path.name}.bak") for n in range(1, 10**6))
    return next(candidate for candidate in candidates if not candidate.exists())
