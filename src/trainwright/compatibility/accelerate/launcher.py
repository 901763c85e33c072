"""Accelerate as another launcher (``recipe/registries.py``, LAUNCHERS): its file, or the variables that it has set.

Accelerate's library reads the variables in the worker (ACCELERATE_*, FSDP_*, PARALLELISM_CONFIG_*). Its launcher
always sets most of them, so a default value need not be a choice of the user; see AccelerateConfig.stated.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainwright.compatibility.accelerate import strategies
from trainwright.compatibility.accelerate.machine import refuse_count_of_one_machine, require
from trainwright.compatibility.accelerate.reading import AccelerateConfig, ConfigSection, locate_default_file
from trainwright.compatibility.accelerate.translation import (
    Translation,
    build_rendezvous_error,
    find_last_value,
    interpret,
    read_translation,
)
from trainwright.errors import MachineError, TrainwrightError
from trainwright.machine.detect import detect
from trainwright.run.group.environment import Variables


def find_translation(
    file: Path,
    overrides: Sequence[str],
    *,
    nodes: int | None = None,
    node_rank: int | None = None,
    rendezvous: str | None = None,
) -> Translation:
    """Return the translation of a file, with the command line's numbers in place of its own, checked for this
    machine.

    ``overrides`` may contain words other than section.key=value, such as the recipe's name. GPUs that the file excludes
    are hidden from this process and its children (CUDA_VISIBLE_DEVICES), so call this before the machine is inspected.

    Raises:
        RequestError: the file cannot be read or is not supported, does not say where its machines meet, or counts the
            processes of one machine only.
        MachineError: this machine lacks the GPUs or the library asked for; the message says what would run here.
    """
    translation = read_translation(file).set_machines(nodes, node_rank, rendezvous)
    processes = find_last_value(overrides, "parallel.num_processes")
    if processes is not None:
        translation = replace(translation, processes=int(processes) if processes.isdigit() else None)
    translation.refuse_problems()
    if (error := build_rendezvous_error(translation)) is not None:
        raise error
    machine = detect()
    if processes is None:
        refuse_count_of_one_machine(translation, machine)
    require(translation, machine)
    os.environ.update(translation.build_device_environment())
    return translation


def read_joined_translation() -> Translation | None:
    """Return what `accelerate launch` read from its file, with the reason why this process cannot train, if there is
    one; None if something else started this process. GPUs that the file excludes are hidden, as above.
    """
    translation = from_environment()
    if translation is None:
        return None
    os.environ.update(translation.build_device_environment())
    try:
        if translation.one_of_several:
            raise MachineError(
                f"{translation.source}: accelerate launch starts one process for {translation.distributed_type} "
                "on a CPU, whatever num_processes says; start the recipe with trainwright train RECIPE "
                "--accelerate-config FILE, or with torchrun --nproc-per-node"
            )
        translation.refuse_problems()
        require(translation, detect())
    except TrainwrightError as error:
        return replace(translation, refusal=error)
    return translation


def default_file() -> Path | None:
    """Return Accelerate's default file, if it exists."""
    path = locate_default_file()
    return path if path.is_file() else None


class Accelerate:
    """The functions that the core calls."""

    of_file = staticmethod(find_translation)
    of_environment = staticmethod(read_joined_translation)
    default_file = staticmethod(default_file)


# Key of fsdp_config -> variable and the value that Accelerate's launcher sets by default.
_FSDP: dict[str, tuple[str, str | None]] = {
    "fsdp_version": ("FSDP_VERSION", "1"),
    "fsdp_sharding_strategy": ("FSDP_SHARDING_STRATEGY", "FULL_SHARD"),
    "fsdp_reshard_after_forward": ("FSDP_RESHARD_AFTER_FORWARD", "true"),
    "fsdp_offload_params": ("FSDP_OFFLOAD_PARAMS", "false"),
    "fsdp_min_num_params": ("FSDP_MIN_NUM_PARAMS", "100000000"),
    "fsdp_auto_wrap_policy": ("FSDP_AUTO_WRAP_POLICY", None),
    "fsdp_transformer_layer_cls_to_wrap": ("FSDP_TRANSFORMER_CLS_TO_WRAP", None),
    "fsdp_backward_prefetch": ("FSDP_BACKWARD_PREFETCH", None),
    "fsdp_state_dict_type": ("FSDP_STATE_DICT_TYPE", None),
    "fsdp_forward_prefetch": ("FSDP_FORWARD_PREFETCH", "false"),
    "fsdp_use_orig_params": ("FSDP_USE_ORIG_PARAMS", "true"),
    "fsdp_cpu_ram_efficient_loading": ("FSDP_CPU_RAM_EFFICIENT_LOADING", "true"),
    "fsdp_sync_module_states": ("FSDP_SYNC_MODULE_STATES", "true"),
    "fsdp_activation_checkpointing": ("FSDP_ACTIVATION_CHECKPOINTING", "false"),
    "fsdp_activation_checkpointing_offload": ("FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD", "false"),
    "fsdp_ignored_modules": ("FSDP_IGNORED_MODULES", None),
}
_NAMES = ("sharding_strategy", "auto_wrap_policy", "backward_prefetch", "state_dict_type")
_DEEPSPEED = {
    "zero_stage": "ACCELERATE_DEEPSPEED_ZERO_STAGE",
    "gradient_accumulation_steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    "gradient_clipping": "ACCELERATE_GRADIENT_CLIPPING",
    "offload_optimizer_device": "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE",
    "offload_param_device": "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE",
    "offload_optimizer_nvme_path": "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH",
    "offload_param_nvme_path": "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH",
    "zero3_init_flag": "ACCELERATE_DEEPSPEED_ZERO3_INIT",
    "zero3_save_16bit_model": "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL",
    "deepspeed_config_file": "ACCELERATE_DEEPSPEED_CONFIG_FILE",
    "deepspeed_moe_layer_cls_names": "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES",
}
_DYNAMO: dict[str, tuple[str, str | None]] = {
    "dynamo_backend": ("ACCELERATE_DYNAMO_BACKEND", "NO"),
    "dynamo_mode": ("ACCELERATE_DYNAMO_MODE", "default"),
    "dynamo_use_fullgraph": ("ACCELERATE_DYNAMO_USE_FULLGRAPH", "False"),
    "dynamo_use_dynamic": ("ACCELERATE_DYNAMO_USE_DYNAMIC", "False"),
    "dynamo_use_regional_compilation": ("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", "False"),
}
_SIZES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
_PARALLELISM: dict[str, tuple[str, str | None]] = {
    f"parallelism_config_{name}": (f"PARALLELISM_CONFIG_{name.upper()}", default)
    for name, default in (
        ("dp_replicate_size", "1"),
        ("dp_shard_size", "1"),
        ("tp_size", "1"),
        ("cp_size", "1"),
        ("cp_backend", "torch"),
        ("cp_comm_strategy", None),
        ("sp_size", "1"),
        ("sp_backend", "deepspeed"),
        ("sp_seq_length", None),
        ("sp_seq_length_is_variable", None),
        ("sp_attn_implementation", None),
    )
}


def from_environment(environment: Mapping[str, str] | None = None) -> Translation | None:
    """Return the settings that `accelerate launch` passed to this worker; None if something else started it."""
    variables = os.environ if environment is None else environment
    if "ACCELERATE_MIXED_PRECISION" not in variables and not Variables(variables).list_accelerate_plugins():
        return None
    return interpret(_build_source(variables))


def build_worker_environment(source: AccelerateConfig, translation: Translation, *, on_cpu: bool) -> dict[str, str]:
    """Return the variables for workers that run a user's own script, from the settings of the file.

    ``on_cpu``: the workers have no GPU. Accelerate's library would otherwise make each of them a separate run.
    """
    variables = {"ACCELERATE_MIXED_PRECISION": str(_choose_precision(source))}
    if on_cpu:
        variables["ACCELERATE_USE_CPU"] = "true"
    dynamo = dict(_list_items(source, "dynamo_config", "dynamo_"))
    if isinstance(source.values.get("dynamo_backend"), str):
        dynamo.setdefault("dynamo_backend", source.values["dynamo_backend"])
    for key, (name, default) in _DYNAMO.items():
        value = _format_value(default if dynamo.get(key) is None else dynamo[key])
        variables[name] = value.upper() if key == "dynamo_backend" else value
    for key, name in (("debug", "ACCELERATE_DEBUG_MODE"), ("enable_cpu_affinity", "ACCELERATE_CPU_AFFINITY")):
        if _format_value(source.values.get(key, False)).lower() in ("true", "yes", "1"):
            variables[name] = "1"
    for key, value in _list_items(source, "fp8_config", "fp8_"):
        variables[f"ACCELERATE_{key.upper()}"] = _format_value(value)
    if translation.distributed_type == "FSDP":
        variables |= _build_fsdp_variables(source)
    if translation.distributed_type == "DEEPSPEED":
        variables |= _build_deepspeed_variables(source)
    if isinstance(source.values.get("parallelism_config"), dict):
        variables |= _build_parallelism_variables(source)
    return variables


def _choose_precision(source: AccelerateConfig) -> str:
    value = source.values.get("mixed_precision")
    if value in (None, False):
        return "fp16" if source.values.get("fp16") else "no"
    return str(value).lower()


def _build_fsdp_variables(source: AccelerateConfig) -> dict[str, str]:
    fields = dict(_list_items(source, "fsdp_config", "fsdp_"))
    reshard = str(fields.get("fsdp_reshard_after_forward", "")).upper()
    if reshard in strategies.SHARDING:
        # Version 1's wizard writes the sharding strategy under this name. In Accelerate 1.15 the default of the other
        # variable takes precedence, so it must be set there.
        fields.setdefault("fsdp_sharding_strategy", reshard)
    variables = {"ACCELERATE_USE_FSDP": "true"}
    for key, (name, default) in _FSDP.items():
        value = fields.get(key)
        if isinstance(value, list):
            value = ",".join(map(str, value))
        if value is None and default is None:
            continue
        text = _format_value(default if value is None else value)
        is_name = key.removeprefix("fsdp_") in _NAMES
        variables[name] = text.upper() if is_name else text if "cls" in key or "modules" in key else text.lower()
    return variables


def _build_deepspeed_variables(source: AccelerateConfig) -> dict[str, str]:
    options = dict(_list_items(source, "deepspeed_config", ""))
    variables = {"ACCELERATE_USE_DEEPSPEED": "true"}
    fields = [*options, *(["mixed_precision"] if source.values.get("mixed_precision") is not None else [])]
    variables["ACCELERATE_CONFIG_DS_FIELDS"] = ",".join(fields)
    for key, name in _DEEPSPEED.items():
        if options.get(key) is not None:
            text = _format_value(options[key])
            variables[name] = text if key.endswith(("file", "path", "names")) else text.lower()
    if options.get("deepspeed_config_file") is not None:
        json_file = strategies.find_json(str(options["deepspeed_config_file"]), source)
        variables[_DEEPSPEED["deepspeed_config_file"]] = str(json_file or options["deepspeed_config_file"])
    return variables


def _build_parallelism_variables(source: AccelerateConfig) -> dict[str, str]:
    sizes = dict(_list_items(source, "parallelism_config", "parallelism_config_"))
    variables = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true"} if sizes else {}
    for key, (name, default) in _PARALLELISM.items():
        value = sizes.get(key, default)
        if sizes and value is not None:
            variables[name] = _format_value(value)
    return variables


def _list_items(source: AccelerateConfig, name: str, prefix: str) -> list[tuple[str, Any]]:
    part = ConfigSection(source, (name,), prefix)
    return [(key, part.raw(key)) for key in part.given()]


def _format_value(value: Any) -> str:
    return ("true" if value else "false") if isinstance(value, bool) else str(value)


def _build_source(variables: Mapping[str, str]) -> AccelerateConfig:
    values: dict[str, Any] = {}
    origins: dict[tuple[str, ...], str] = {}

    def take(path: tuple[str, ...], name: str, unless: str | None = None) -> None:
        value = variables.get(name)
        if value is None or value == "" or value == unless:
            return
        part = values
        for key in path[:-1]:
            part = part.setdefault(key, {})
        part[path[-1]] = value
        origins[path] = name

    plugins = Variables(variables).list_accelerate_plugins()
    take(("mixed_precision",), "ACCELERATE_MIXED_PRECISION", unless="no")
    for part, keys in (("dynamo_config", _DYNAMO), ("parallelism_config", _PARALLELISM), ("fsdp_config", _FSDP)):
        for key, (name, default) in keys.items():
            if part != "fsdp_config" or "FSDP" in plugins:
                take((part, key), name, unless=default)
    if "DEEPSPEED" in plugins:
        for key, name in _DEEPSPEED.items():
            take(("deepspeed_config", key), name)
    take(("num_processes",), "WORLD_SIZE")
    take(("num_machines",), "GROUP_WORLD_SIZE")
    take(("machine_rank",), "GROUP_RANK")
    take(("main_process_ip",), "MASTER_ADDR")
    on_cpu = variables.get("ACCELERATE_USE_CPU", "").lower() in ("true", "1", "yes")
    alone = not any(name in variables for name in _SIZES)
    kind, variable = _choose_kind(plugins, variables, on_cpu=on_cpu, alone=alone)
    values["distributed_type"], values["use_cpu"] = kind, on_cpu
    origins |= {("distributed_type",): variable, ("use_cpu",): "ACCELERATE_USE_CPU"}
    return AccelerateConfig(
        name="the environment of accelerate launch",
        values=values,
        places=origins,
        directory=Path(),
        stated=False,
        # Its launchers of several processes do not pass use_cpu on: an FSDP file with and without it looks the same.
        device_stated=kind == "MULTI_GPU",
        # Its launcher of one process sets a rendezvous address only if the file has several processes.
        one_of_several=alone and "MASTER_ADDR" in variables,
    )


def _choose_kind(
    plugins: Mapping[str, str], variables: Mapping[str, str], *, on_cpu: bool, alone: bool
) -> tuple[str, str]:
    for name, variable in plugins.items():
        return name, variable
    if variables.get("ACCELERATE_USE_MEGATRON_LM", "").lower() == "true":
        return "MEGATRON_LM", "ACCELERATE_USE_MEGATRON_LM"
    if alone:
        several = "MASTER_ADDR" in variables
        return ("MULTI_CPU" if on_cpu else "MULTI_GPU") if several else "NO", "ACCELERATE_USE_CPU"
    return ("MULTI_CPU" if on_cpu else "MULTI_GPU"), "WORLD_SIZE"
