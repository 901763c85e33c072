"""Translate the `deepspeed_config` of an Accelerate file, inline or in a JSON file, to zero1, zero2 or zero3."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainwright.compatibility.accelerate.reading import AccelerateConfig, read_json
from trainwright.compatibility.accelerate.values import ConfigSection, Draft
from trainwright.errors import RequestError
from trainwright.recipe.strategy_spec import spec_of
from trainwright.utils.paths import user_path

_DEVICES = ("NONE", "CPU", "NVME")
_DEFAULT_STAGE = 2  # Accelerate's default, if neither the file nor a JSON file sets it
_SAVED_WHOLE = "final/ is always one full model"
_EACH = "start the hosts to use with --hosts or --hostfile over ssh, or the command once on each machine, as with srun"
_OFFLOADED = {"optimizer": "parallel.offload_optimizer", "param": "parallel.offload_parameters"}
_NOTES = {
    "zero3_init_flag": "with zero3, weights are always loaded shard by shard",
    "zero3_save_16bit_model": _SAVED_WHOLE,
    "deepspeed_moe_layer_cls_names": "experts are sharded like all other layers",
    "deepspeed_hostfile": "pass the file to the command, which starts its hosts: train RECIPE --hostfile FILE",
    "deepspeed_inclusion_filter": _EACH,
    "deepspeed_exclusion_filter": _EACH,
    "enable_msamp": "not supported",
    "msamp_opt_level": "not supported",
    "offload_optimizer_nvme_path": "for offload to nvme only",
    "offload_param_nvme_path": "for offload to nvme only",
}
KEYS = (
    "deepspeed_config_file",
    "zero_stage",
    "offload_optimizer_device",
    "offload_param_device",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "deepspeed_multinode_launcher",
    *_NOTES,
)


def interpret(part: ConfigSection, draft: Draft) -> None:
    """Add the settings of ``part``, and of the JSON file that it names."""
    source = part.source
    stage = part.count("zero_stage")
    origin = part.place("zero_stage")
    if stage is not None and stage > 3:
        part.wrong("zero_stage", "0, 1, 2 or 3")
        stage = None
    name = part.text("deepspeed_config_file")
    if name is not None and name.lower() != "none":
        _json_file(name, part.place("deepspeed_config_file"), draft, source)
    elif stage is None:
        stage, origin = _DEFAULT_STAGE, f"{source.place('distributed_type')}: DEEPSPEED without a zero_stage"
    if stage is not None:
        draft.set("parallel.strategy", _strategy(stage), origin)
    _offload(part, draft)
    _steps(part, draft)
    launcher = part.text("deepspeed_multinode_launcher")
    if launcher is not None and launcher.lower() != "standard":
        draft.note("deepspeed_multinode_launcher", _EACH)
    for key, reason in _NOTES.items():
        if key in part and source.stated and str(part.raw(key)).lower() not in ("none", "false"):
            draft.note(key, reason)
        part.raw(key)
    for text in part.unknown(KEYS, {}):
        draft.problem(text, for_script=True)


def _strategy(stage: int) -> str:
    return f"zero{stage}" if stage else "ddp"


def _offload(part: ConfigSection, draft: Draft) -> None:
    for name, recipe_key in _OFFLOADED.items():
        key = f"offload_{name}_device"
        device = part.choice(key, _DEVICES)
        if device == "NVME":
            draft.problem(f"{part.place(key)}: only offload to the host's memory is supported; set it to cpu")
        elif device == "CPU" or (device == "NONE" and part.source.stated):
            draft.set(recipe_key, device == "CPU", part.place(key))
    strategy = draft.settings.get("parallel.strategy")
    offload = draft.settings.get("parallel.offload_parameters")
    if strategy is None or offload is None or not offload.value:
        return
    if "offload_parameters" not in spec_of(strategy.value).keys:
        draft.problem(f"{offload.origin} contradicts {strategy.origin}: only ZeRO stage 3 offloads parameters")


def _steps(part: ConfigSection, draft: Draft) -> None:
    if part.text("gradient_accumulation_steps") not in (None, "auto"):
        steps = part.count("gradient_accumulation_steps", least=1)
        if steps is not None:
            origin = part.place("gradient_accumulation_steps")
            draft.set("train.gradient_accumulation_steps", steps, origin)
    if part.text("gradient_clipping") not in (None, "auto", "none"):
        norm = part.decimal("gradient_clipping")
        if norm is not None:
            draft.set("optimizer.max_grad_norm", norm or None, part.place("gradient_clipping"))


def find_json(name: str, source: AccelerateConfig) -> Path | None:
    """Return the DeepSpeed file: relative to the working directory, as in Accelerate, or to the Accelerate file."""
    path = user_path(name)
    candidates = [path] if source.directory is None else [path, source.directory / path]
    return next((candidate for candidate in candidates if candidate.is_file()), None)


def _json_file(name: str, origin: str, draft: Draft, source: AccelerateConfig) -> None:
    path = find_json(name, source)
    if path is None:
        also = "" if source.directory in (None, Path()) else f" nor in {source.directory}"
        draft.problem(f"{origin}: no such file{also}", for_script=True)
        return
    try:
        values = read_json(path)
    except RequestError as error:
        draft.problem(str(error), for_script=True)
        return
    draft.set("parallel.deepspeed_config", str(path), origin)
    zero = values.get("zero_optimization")
    zero = zero if isinstance(zero, dict) else {}
    stage = zero.get("stage", 0)
    if stage not in (0, 1, 2, 3):
        draft.problem(f"{path}: zero_optimization.stage: expected 0, 1, 2 or 3, not {stage}")
        return
    draft.set("parallel.strategy", _strategy(stage), f"{path}: zero_optimization.stage: {stage}")
    if stage == 0:
        draft.problem(
            f"{path}: zero_optimization.stage 0 is ddp, which has no DeepSpeed file; remove it from {source.name} and "
            "set distributed_type to MULTI_GPU"
        )
    for name, recipe_key in _OFFLOADED.items():
        key = f"offload_{name}"
        _json_offload(path, key, zero.get(key), recipe_key, draft)
    for key, recipe_key in (
        ("gradient_accumulation_steps", "train.gradient_accumulation_steps"),
        ("train_batch_size", "train.global_batch_size"),
        ("train_micro_batch_size_per_gpu", "train.micro_batch_size"),
        ("gradient_clipping", "optimizer.max_grad_norm"),
    ):
        value = values.get(key, "auto")
        if isinstance(value, int | float) and not isinstance(value, bool):
            norm = value or None if key == "gradient_clipping" else value
            draft.set(recipe_key, norm, f"{path}: {key}: {value}")
    _json_precision(path, values, draft)


def _json_offload(path: Path, key: str, value: Any, recipe_key: str, draft: Draft) -> None:
    device = str(value.get("device", "none")).lower() if isinstance(value, dict) else "none"
    origin = f"{path}: zero_optimization.{key}.device: {device}"
    if device == "nvme":
        draft.problem(f"{origin}: only offload to the host's memory is supported; set it to cpu")
    elif device == "cpu":
        draft.set(recipe_key, True, origin)


def _json_precision(path: Path, values: dict[str, Any], draft: Draft) -> None:
    for name in ("bf16", "fp16"):
        part = values.get(name)
        if isinstance(part, dict) and part.get("enabled") is True:
            draft.set("train.mixed_precision", name, f"{path}: {name}.enabled: true")
