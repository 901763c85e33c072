"""What conversions compute: functions that the tables of tools name.

Each gets the conversion, the setting and its rule, and the keys of the tool that the rule names in ``with``.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainwright.compatibility.accelerate.reading import AccelerateConfig, read, read_json
from trainwright.compatibility.accelerate.translation import Translation, interpret
from trainwright.compatibility.conversion.convert import Conversion, Rule, Setting, find_named_file
from trainwright.compatibility.conversion.script_values import Code
from trainwright.compatibility.conversion.scripts import find_file_near, format_value
from trainwright.compatibility.conversion.shell import LAUNCHER
from trainwright.errors import RequestError
from trainwright.recipe.registries import OBSERVERS
from trainwright.recipe.yaml_text import parse_value
from trainwright.utils.text import format_plural

_PROCESSES = ("num_processes", "nproc_per_node", "num_gpus")
_AS_SHOWN = "logging_steps"  # as often as figures are shown, without a number of steps


def read_launcher(conversion: Conversion) -> None:
    """Set the number of processes, and what an Accelerate file says that the command names."""
    counts = [conversion.value(f"{LAUNCHER}.{name}") for name in _PROCESSES]
    machines = [conversion.value(f"{LAUNCHER}.{name}") for name in ("num_machines", "nnodes", "num_nodes")]
    processes = next((count for count in counts if isinstance(count, int) and count > 0), None)
    nodes = next((count for count in machines if isinstance(count, int) and count > 0), 1)
    if processes is not None and conversion.value(f"{LAUNCHER}.nproc_per_node"):
        processes *= nodes
    for name in ("config_file", "accelerate_config"):
        setting = conversion.settings.pop(f"{LAUNCHER}.{name}", None)
        if setting is not None:
            processes = accelerate_file(conversion, setting) or processes
    if conversion.options.processes is None and processes is not None:
        conversion.options = replace(conversion.options, processes=processes)


def accelerate_file(conversion: Conversion, setting: Setting, rule: Rule | None = None) -> int | None:
    """Take what an Accelerate file sets; return its number of processes."""
    path = find_named_file(conversion, setting)
    if path is None:
        conversion.drop(setting, "is not here: the plan decides how the model is distributed", differs=True)
        return None
    return _take_translation(conversion, setting, lambda: interpret(_replace_files(read(path), path)))


def _replace_files(config: AccelerateConfig, path: Path) -> AccelerateConfig:
    """Return a configuration whose DeepSpeed file is looked for where the tool would be started, too."""
    part = config.values.get("deepspeed_config")
    name = str(part.get("deepspeed_config_file")) if isinstance(part, dict) else "None"
    file = None if Path(name).is_absolute() or config.directory is None else find_file_near(name, path)
    return config if file is None else replace(config, directory=Path(str(file).removesuffix(name) or "."))


def loss_of_pairs(conversion: Conversion, setting: Setting, rule: Rule) -> None:
    """Take a loss that trainers name alike; sigmoid is the loss of the trainer itself."""
    program = str(conversion.value(f"{LAUNCHER}.program"))
    if setting.value in ("sigmoid", ["sigmoid"]) and program not in ("kto", "orpo"):
        conversion.take(setting, "dpo.loss", program if program in ("cpo", "simpo") else "dpo")
    elif setting.value in ("hinge", "ipo") and program not in ("kto", "orpo", "cpo", "simpo"):
        conversion.take(setting, "dpo.loss", setting.value)
    else:
        names = ", ".join(("sigmoid", "hinge", "ipo", *rule.values))
        conversion.refuse(
            setting, f"{format_value(setting.value)} is not supported; {names} are, of the trainers that have them"
        )


def deepspeed_file(conversion: Conversion, setting: Setting, rule: Rule) -> None:
    """Take what a DeepSpeed file sets; the stage is also known from the names of files that are not here."""
    of_launcher = conversion.values.get("parallel.strategy")
    if setting.is_on and of_launcher is not None and of_launcher[1].pattern.startswith(f"{LAUNCHER}."):
        del conversion.values["parallel.strategy"]  # the argument counts, as in transformers' Trainer
    if isinstance(setting.value, dict):
        values = {"distributed_type": "DEEPSPEED", "deepspeed_config": _extract_deepspeed_keys(setting.value)}
        _take_translation(conversion, setting, lambda: interpret(_build_config(setting, values)))
        return
    path = find_named_file(conversion, setting)
    if path is not None and _read_stage(path) == 0:
        conversion.take(setting, "parallel.strategy", "ddp", computed="stage 0")
        return
    if path is not None:
        _take_translation(conversion, setting, lambda: interpret(read(path)))
        return
    name = Path(str(setting.value)).name.lower()
    match = re.search(r"(?:zero|z|stage|s)[-_]?([0123])", name)
    if match is None:
        conversion.drop(setting, "is not here: the plan decides how the model is distributed", differs=True)
        return
    strategy = f"zero{match[1]}" if match[1] != "0" else "ddp"
    conversion.take(setting, "parallel.strategy", strategy, computed=f"by its name: {setting.value} is not here")
    for word, key in (("offload", "parallel.offload_optimizer"), ("cpu", "parallel.offload_optimizer")):
        if word in name and match[1] != "0":
            conversion.take(setting, key, True, computed="by its name")


def fsdp(conversion: Conversion, setting: Setting, rule: Rule, options: str) -> None:
    """Take the options of FSDP of transformers' Trainer and of Axolotl."""
    words = setting.value if isinstance(setting.value, list) else re.split(r"[\s,]+", str(setting.value))
    option_values = conversion.value(options)
    if isinstance(option_values, str | Code) or not setting.is_on:
        option_values = {}
    keys = {f"fsdp_{str(key).removeprefix('fsdp_')}": value for key, value in (option_values or {}).items()}
    keys = {key: value for key, value in keys.items() if key not in ("fsdp_min_num_params", "fsdp_version")}
    moved_keys = {"fsdp_transformer_layer_cls_to_wrap", "fsdp_mixed_precision_policy", "fsdp_final_state_dict_type"}
    keys = {key: value for key, value in keys.items() if key not in moved_keys}
    if "offload" in words:
        keys["fsdp_offload_params"] = True
    if not setting.is_on or (setting.value is True and not keys):
        return
    values = {"distributed_type": "FSDP", "fsdp_config": keys}
    _take_translation(conversion, setting, lambda: interpret(_build_config(setting, values)))


def _extract_deepspeed_keys(values: dict[str, Any]) -> dict[str, Any]:
    zero = values.get("zero_optimization")
    zero = zero if isinstance(zero, dict) else {}
    devices = {f"{key}_device": part.get("device") for key, part in zero.items() if isinstance(part, dict)}
    offloads = {key: devices[key] for key in ("offload_optimizer_device", "offload_param_device") if devices.get(key)}
    return {"zero_stage": zero.get("stage", 0), **offloads}


def _read_stage(path: Path) -> Any:
    try:
        zero = read_json(path).get("zero_optimization")
    except RequestError:  # said when the file is translated
        return None
    return zero.get("stage", 0) if isinstance(zero, dict) else None


def _build_config(setting: Setting, values: dict[str, Any]) -> AccelerateConfig:
    return AccelerateConfig(str(setting.origin), values, stated=False, device_stated=False)


def _take_translation(conversion: Conversion, setting: Setting, translate: Any) -> int | None:
    try:
        translation: Translation = translate()
    except RequestError as error:
        conversion.refuse(setting, str(error))
        return None
    for problem in translation.problems:
        conversion.refuse(setting, problem.text)
    for key, ours in translation.settings.items():
        if key not in ("parallel.num_processes", "train.micro_batch_size", "train.gradient_accumulation_steps"):
            origin = Setting(setting.key, setting.pattern, ours.value, setting.origin, is_default=True)
            conversion.take(origin, key, ours.value)
    for note in translation.notes:
        conversion.drop(setting, f"{', '.join(note.keys)}: {note.reason}")
    return translation.processes


def global_batch_size(
    conversion: Conversion, setting: Setting, rule: Rule, micro: str, packing: str = "", world: str = "", **sharing: str
) -> None:
    """Compute the examples of a step, or its packs if packed: micro-batch x accumulation x processes.

    ``sharing``: keys with numbers of processes that work on the same examples.
    """
    rows, steps, processes = conversion.value(micro), setting.value, conversion.processes
    if world and isinstance(count := conversion.value(world), int) and conversion.options.processes is None:
        processes = count
    if not isinstance(rows, int) or not isinstance(steps, int):
        conversion.need(setting, f"the batch size is not a number: {rows} x {steps}; pass KEY=VALUE")
        return
    shares = [n for key in sharing.values() if isinstance(n := conversion.value(key), int) and n > 1]
    words = f"{rows} x {steps} x {format_plural(processes, 'process', 'processes')}"
    if shares and processes > 1:
        if processes % math.prod(shares):
            shared = " x ".join(map(str, shares))
            conversion.refuse(setting, f"{shared} processes share examples, which does not divide {processes}")
            return
        words += "".join(f" / {count}" for count in shares)
        processes //= math.prod(shares)
    size = rows * steps * processes
    if conversion.options.processes is None and processes == 1:
        words += ": pass --processes N for more"
    if packing and conversion.has_effect(packing):
        conversion.take(setting, "train.batch_unit", "packs", computed="a batch counts packs")
    conversion.take(setting, "train.global_batch_size", size, computed=words)


def divided(conversion: Conversion, setting: Setting, rule: Rule) -> None:
    """Leave out a division of the model or of sequences over processes, which changes no sum."""
    is_on = isinstance(setting.value, int) and setting.value > 1
    reason = f"{rule.drop}: the same training, with more memory on each"
    conversion.drop(setting, reason if is_on else "asks for nothing", differs=is_on)


def max_length(conversion: Conversion, setting: Setting, rule: Rule) -> None:
    """Take the maximum length, which a recipe always has."""
    if isinstance(setting.value, int) and setting.value > 0:
        conversion.take(setting, str(rule.to), setting.value)
    else:
        conversion.need(setting, f"does not limit the length of examples: pass {setting.key}=N")


def pack_length(conversion: Conversion, setting: Setting, rule: Rule, length: str) -> None:
    """Pack to the maximum length of an example."""
    if setting.is_on:
        conversion.take(setting, "data.pack_length", conversion.value(length), rule.note, computed=f"as {length}")


def interval(conversion: Conversion, setting: Setting, rule: Rule, strategy: str) -> None:
    """Take an interval in steps, or compute that of a strategy of epochs; both are of no effect on the training."""
    strategy_value, key = str(conversion.value(strategy)).lower(), str(rule.to)
    if strategy_value in ("no", "false", "none"):
        conversion.drop(setting, f"has no effect with {strategy}: no")
    elif strategy_value == "epoch":
        _take_part_of_epoch(conversion, conversion.settings[strategy], key, 1)
    elif setting.value == _AS_SHOWN:
        steps = conversion.value(setting.key.removesuffix("eval_steps") + _AS_SHOWN)
        number = steps if isinstance(steps, int) and steps >= 1 else 500
        conversion.take(setting, key, number, computed=f"as {_AS_SHOWN}")
    elif isinstance(setting.value, int) and setting.value >= 1:
        conversion.take(setting, key, setting.value)
    elif not setting.is_default and setting.is_on:
        conversion.drop(setting, f"is a part of all steps: set {key} to a number of them", differs=True)


def per_epoch(conversion: Conversion, setting: Setting, rule: Rule) -> None:
    """Compute the steps between as many times in an epoch."""
    if setting.is_on and isinstance(setting.value, int):
        _take_part_of_epoch(conversion, setting, str(rule.to), setting.value)
    else:
        conversion.drop(setting, "asks for nothing")


def _take_part_of_epoch(conversion: Conversion, setting: Setting, key: str, parts: int) -> None:
    rows, batch = conversion.options.rows, conversion.values.get("train.global_batch_size")
    if rows is None or batch is None:
        what = "checkpoints are written by time" if key == "checkpoint.every" else "evaluated before and after training"
        conversion.drop(setting, f"{what}: pass --rows N, the training rows, for {key} in steps", differs=True)
        return
    steps = max(1, math.ceil(rows / batch[0]) // parts)
    conversion.take(setting, key, steps, computed=f"{rows:,} rows / {batch[0]} examples / {parts}")


def epochs_of_warmup(conversion: Conversion, setting: Setting, rule: Rule, epochs: str) -> None:
    """Compute the part of all steps that epochs of warm-up are."""
    total = conversion.value(epochs)
    if isinstance(total, int | float) and total > setting.value:
        part = setting.value / total
        conversion.take(setting, "optimizer.warmup_steps", part, computed=f"{setting.value:g} of {total:g} epochs")
    elif setting.is_on:
        conversion.refuse(setting, "is longer than the training")


def validation_rows(conversion: Conversion, setting: Setting, rule: Rule) -> None:
    """Take a part or a number of the rows as validation rows."""
    value = setting.value
    if not setting.is_on:
        if "validation" not in conversion.sources:
            conversion.take(setting, "data.validation", None)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        conversion.take(setting, "data.validation", int(value) if value >= 1 else value)
    else:
        conversion.refuse(setting, "is neither a part nor a number of the rows")


def margin(conversion: Conversion, setting: Setting, rule: Rule, beta: str) -> None:
    """Compute the margin of SimPO from its ratio to beta."""
    scale = conversion.value(beta)
    conversion.take(setting, "task", "dpo")
    conversion.take(setting, "dpo.loss", "simpo")
    if isinstance(scale, int | float) and isinstance(setting.value, int | float):
        margin = float(f"{setting.value * scale:.9g}")
        conversion.take(setting, "dpo.margin", margin, computed=f"{setting.value:g} x {beta}")
    else:
        conversion.need(setting, f"is the margin of SimPO as a part of {beta}: pass {beta}=VALUE")


def schedule_arguments(conversion: Conversion, setting: Setting, rule: Rule, schedule: str, rate: str) -> None:
    """Take the arguments of a schedule of transformers (optimization.py)."""
    values = setting.value if isinstance(setting.value, dict) else {}
    if setting.is_on and not values:
        conversion.refuse(setting, "is not a mapping of arguments")
    for name, value in values.items():
        if name == "min_lr":
            ratio = float(f"{float(value) / float(conversion.value(rate)):.9g}")
            key = "optimizer.final_learning_rate_ratio"
            conversion.take(setting, key, ratio, computed=f"{value:g} / {rate}")
        elif name in ("min_lr_rate", "min_lr_ratio"):
            conversion.take(setting, "optimizer.final_learning_rate_ratio", float(value))
        elif name == "num_cycles" and "restarts" in str(conversion.value(schedule)):
            conversion.take(setting, "optimizer.cycles", int(value))
        elif name == "num_cycles" and value == 0.5:
            conversion.drop(setting, "is half a period of the cosine, as here")
        elif name == "power":
            conversion.take(setting, "optimizer.power", float(value))
        elif name == "lr_end" and float(value) <= 1e-6:
            conversion.drop(setting, f"the rate falls to 0 in place of {value}", differs=True)
        elif name == "num_decay_steps":
            conversion.take(setting, "optimizer.decay_steps", value)
        elif name == "num_stable_steps":
            conversion.drop(setting, "is what the warm-up and the decay leave")
        elif name in ("warmup_type", "decay_type") and value in ("linear", None):
            conversion.drop(setting, "is linear here, too")
        else:
            conversion.refuse(setting, f"{name}: {value} changes the schedule {conversion.value(schedule)}")


def observers(conversion: Conversion, setting: Setting, rule: Rule) -> None:
    """Turn on the trackers that are named; TensorBoard's curves are always written."""
    if isinstance(setting.value, Code):
        conversion.drop(setting, "the script computes it; set logging.observers for a tracker", differs=True)
        return
    trackers = setting.value if isinstance(setting.value, list) else str(setting.value).split(",")
    ours = [name for name in map(str, trackers) if name in OBSERVERS.names() and name != "tensorboard"]
    other_trackers = [name for name in map(str, trackers) if name not in (*OBSERVERS.names(), "none", "all", "None")]
    if ours:
        conversion.take(setting, "logging.observers", dict.fromkeys(ours, True))
    if other_trackers:
        conversion.drop(
            setting, f"there is no observer {', '.join(other_trackers)}; events.jsonl has every figure", differs=True
        )
    elif not ours and not setting.is_default:
        conversion.drop(setting, "curves for TensorBoard are written in any case")


def tracker(conversion: Conversion, setting: Setting, rule: Rule) -> None:
    """Turn on the tracker whose name is in the key."""
    name = next((name for name in ("wandb", "mlflow", "trackio") if name in setting.pattern), None)
    if not setting.is_on or name is None:
        conversion.drop(setting, "asks for nothing")
        return
    earlier = conversion.values.get("logging.observers")
    value = {**(earlier[0] if earlier else {}), name: True}
    conversion.values.pop("logging.observers", None)
    conversion.take(setting, "logging.observers", value, computed="its project and name are set in its variables")


def precision(conversion: Conversion, setting: Setting, rule: Rule, fp16: str = "") -> None:
    """Take the precision of bf16 and fp16."""
    word, half = str(setting.value).lower(), str(conversion.value(fp16)).lower()
    if word in ("true", "full"):
        in_fp32 = "the weights are kept in fp32, unless optimizer.master_weights is false"
        note = in_fp32 if word == "full" else None
        conversion.take(setting, "train.mixed_precision", "bf16", note)
    elif word == "auto" or "supported" in word:
        conversion.take(setting, "train.mixed_precision", "auto")
    elif half in ("true", "full", "apex"):
        conversion.take(setting, "train.mixed_precision", "fp16")
    else:
        conversion.take(setting, "train.mixed_precision", "auto" if "supported" in half else "no")


def targets(conversion: Conversion, setting: Setting, rule: Rule) -> None:
    """Take the modules to adapt, from a list, words with commas or spaces, or all."""
    value = setting.value
    words = value if isinstance(value, list) else re.split(r"[\s,\"]+", str(value).strip())
    names = [str(word) for word in words if str(word)]
    key = "model.adapter.targets"
    if any(name in ("all", "all-linear") for name in names) or value is True:
        conversion.take(setting, key, "all-linear")
    elif not names or not setting.is_on:
        conversion.drop(setting, "asks for nothing")
    elif re.search("vision|language_model|visual", "".join(names)):
        conversion.refuse(setting, "adapts modules of a model that reads images", "vision")
    elif len(names) == 1 and re.search(r"[*+()|\\\[\]^$]", names[0]):
        conversion.take(setting, key, names[0])
    else:
        conversion.take(setting, key, names)


def target_parameters(conversion: Conversion, setting: Setting, rule: Rule, **modules: str) -> None:
    """Adapt weights of experts; without one of the keys that choose ``modules``, these alone, as PEFT."""
    words = setting.value if isinstance(setting.value, list) else re.split(r"[\s,]+", str(setting.value or ""))
    names = [str(word) for word in words if word]
    if not names:
        conversion.drop(setting, "asks for nothing")
        return
    conversion.take(setting, "model.adapter.target_parameters", names)
    if modules and not any(map(conversion.is_on, modules.values())):
        conversion.take(setting, "model.adapter.targets", [])


_OF_OPTIMIZERS = {"eps": "optimizer.eps", "momentum": "optimizer.momentum", "beta1": "optimizer.betas[0]"}
_OF_OPTIMIZERS |= {"beta2": "optimizer.betas[1]", "betas": "optimizer.betas"}


def optimizer_arguments(conversion: Conversion, setting: Setting, rule: Rule) -> None:
    """Take arguments of the optimizer: a mapping, or words such as ``eps=1e-8,momentum=0.9``."""
    values = setting.value
    if isinstance(values, str):
        pairs = [part.partition("=") for part in re.split(r"[,\s]+", values) if part]
        values = {name: parse_value(text, "", ())[0] if text else None for name, _, text in pairs}
    for name, value in (values or {}).items():
        if name in _OF_OPTIMIZERS and (isinstance(value, list) or float(value) >= 0):
            conversion.take(setting, _OF_OPTIMIZERS[name], value if isinstance(value, list) else float(value))
        else:
            conversion.refuse(setting, f"passes {name}: {format_value(value)} to the optimizer")
    if not values:
        conversion.drop(setting, "asks for nothing")


def early_stopping(conversion: Conversion, setting: Setting, rule: Rule) -> None:
    """Stop after as many evaluations without a lower validation loss."""
    if setting.is_on:
        conversion.take(setting, "evaluate.early_stopping", {"patience": int(setting.value)})
    else:
        conversion.drop(setting, "asks for nothing")


def best_metric(conversion: Conversion, setting: Setting, rule: Rule) -> None:
    """Take the validation set whose loss is named, as eval_NAME_loss, for the best checkpoint."""
    match = re.fullmatch(r"(?:eval_)?(.+)_loss", str(setting.value))
    if match is None and conversion.is_on("early_stopping_steps"):
        conversion.refuse(setting, f"stops by {setting.value}; the loss of all sets or of one, eval_NAME_loss, is")
    elif match is None:
        why = f"the checkpoint with the lowest validation loss is kept, not the best by {format_value(setting.value)}"
        conversion.drop(setting, why, differs=True)
    else:
        conversion.take(setting, "evaluate.main_set", match[1])


def adapter_type(conversion: Conversion, setting: Setting, rule: Rule) -> None:
    """Train the adapter that a key such as use_dora or use_qlora asks for, in place of plain LoRA."""
    if setting.is_on:
        conversion.values.pop("model.adapter.type", None)
        conversion.take(setting, "model.adapter.type", "qlora" if "qlora" in setting.pattern else "dora")
    else:
        conversion.drop(setting, "asks for nothing")


def chat_template(conversion: Conversion, setting: Setting, rule: Rule) -> None:
    """Take a template's text or file."""
    if not setting.is_on:
        conversion.drop(setting, "asks for nothing")
    elif "{" in str(setting.value) or str(setting.value).endswith((".jinja", ".jinja2")):
        conversion.take(setting, "model.chat_template", setting.value)
    else:
        reason = "the template of the model's tokenizer is used, which has to be that of this name"
        conversion.drop(setting, reason, differs=True)


def model_name(conversion: Conversion, setting: Setting, rule: Rule, revision: str) -> None:
    """Take the name of a model, with its revision."""
    commit = conversion.value(revision)
    if commit in (None, "main") or isinstance(setting.value, Code):
        conversion.take(setting, "model.name", setting.value)
    else:
        conversion.take(setting, "model.name", commit if isinstance(commit, Code) else f"{setting.value}@{commit}")


def overrides(conversion: Conversion, setting: Setting, rule: Rule) -> None:
    """Change values of the model's configuration."""
    if not setting.is_on:
        conversion.drop(setting, "asks for nothing")
        return
    if not isinstance(setting.value, dict):
        conversion.refuse(setting, "is no mapping of keys of the model's configuration")
        return
    value = {setting.key: setting.value} if setting.key == "rope_scaling" else setting.value
    earlier = conversion.values.pop("model.overrides", None)
    conversion.take(setting, "model.overrides", {**(earlier[0] if earlier else {}), **value})
