"""What the table of torchtune computes."""

from __future__ import annotations

from trainwright.compatibility.conversion import functions
from trainwright.compatibility.conversion.convert import Conversion, Rule, Setting

_MODULES = {"output_proj": "o_proj"}
_MLP = ["gate_proj", "up_proj", "down_proj"]
# Tokenizers that write the marks of a chat around the turns, and the template with the same marks; the others write the
# texts alone.
_TEMPLATES = {"llama3": "llama3", "qwen": "qwen", "phi3": "phi3", "phi4": "phi4"}


def model(conversion: Conversion, setting: Setting, rule: Rule) -> None:
    """Set the adapter that the builder of the model is for."""
    builder = str(setting.value).rpartition(".")[2]
    if any(word in str(setting.value) for word in ("vision", "clip", "flamingo", "deep_fusion", "early_fusion")):
        conversion.refuse(setting, "reads images", "vision")
    elif "reward" in builder or "classifier" in builder:
        conversion.refuse(setting, "rates answers", "reward")
    else:
        kind = "qlora" if builder.startswith("qlora_") else "lora" if builder.startswith("lora_") else "none"
        conversion.take(setting, "model.adapter.type", kind)


def targets(conversion: Conversion, setting: Setting, rule: Rule, mlp: str, output: str) -> None:
    """Take the modules to adapt by the names that transformers has for them."""
    names = [_MODULES.get(name, name) for name in setting.value] + (_MLP if conversion.is_on(mlp) else [])
    names += ["lm_head"] if conversion.is_on(output) else []
    conversion.take(setting, "model.adapter.targets", names)


def tokenizer(conversion: Conversion, setting: Setting, rule: Rule) -> None:
    """Set the chat template that the tokenizer writes."""
    if any(map(conversion.is_on, ("tokenizer.prompt_template", "dataset.chat_format"))) or str(
        conversion.value("dataset._component_")
    ).endswith("text_completion_dataset"):
        return
    name = str(setting.value).rpartition(".")[2]
    template = next((ours for word, ours in _TEMPLATES.items() if name.startswith(word)), "plain")
    conversion.take(setting, "model.chat_template", template)


def prompt_template(conversion: Conversion, setting: Setting, rule: Rule) -> None:
    """Take the template that is named."""
    name = str(setting.value).rpartition(".")[2].lower()
    templates = {"chatmltemplate": "chatml", "llama2chattemplate": "llama2", "mistralchattemplate": "mistral"}
    templates |= {name.replace("template", "format"): ours for name, ours in templates.items()}  # before torchtune 0.2
    if not setting.is_on:
        conversion.drop(setting, "asks for nothing")
    elif name in templates:
        conversion.take(setting, "model.chat_template", templates[name])
    else:
        conversion.refuse(setting, "writes marks of its own around the turns")


# Positions of models (torchtune/models/*/_model_builders.py), by module, and of those with _base in their names.
_POSITIONS = {
    **{"llama2": 4096, "llama3": 8192, "llama3_1": 131_072, "llama3_2": 131_072, "llama3_3": 131_072},
    **{"mistral": 32_768, "gemma": 8192, "gemma2": 8192, "phi3": 4096, "phi4": 16_384},
    **{"qwen2": 32_768, "qwen2_5": 32_768, "qwen3": 40_960},
}
_POSITIONS_OF_BASES = {"qwen2_5": 131_072, "qwen3": 32_768}


def max_length(conversion: Conversion, setting: Setting, rule: Rule, rows: str, positions: str, model: str) -> None:
    """Take the maximum length, which a recipe always has: without one, as many tokens as the model has positions."""
    older = conversion.value(rows)  # of torchtune before 0.2
    parts = str(conversion.value(model)).split(".")
    family = parts[2] if len(parts) == 4 else ""
    of_base = _POSITIONS_OF_BASES.get(family) if parts[-1].endswith("_base") else None
    of_model = conversion.value(positions) or of_base or _POSITIONS.get(family)
    if isinstance(setting.value, int) or isinstance(older, int):
        conversion.take(setting, "data.max_length", setting.value if isinstance(setting.value, int) else older)
    elif isinstance(of_model, int) and not _find_packing_key(conversion):
        why = f"the model's positions, as rows are not cut: pass {setting.key}=N to cut them"
        conversion.take(setting, "data.max_length", of_model, computed=why)
    else:
        conversion.need(setting, f"does not limit the length of examples: pass {setting.key}=N")


def _find_packing_key(conversion: Conversion) -> str:
    """Return the key that asks for packs, or ""."""
    keys = ("dataset.packed", "dataset[].packed")
    return next((item.key for item in conversion.settings.values() if item.pattern in keys and item.is_on), "")


def global_batch_size(conversion: Conversion, setting: Setting, rule: Rule, micro: str, **sharing: str) -> None:
    """Compute the examples or packs of a step."""
    functions.global_batch_size(conversion, setting, rule, micro, packing=_find_packing_key(conversion), **sharing)


def reference(conversion: Conversion, setting: Setting, rule: Rule, model: str) -> None:
    """Accept a reference that is the model itself."""
    if setting.value == conversion.value(model):
        conversion.drop(setting, "the reference is the model that training starts from")
    else:
        conversion.refuse(setting, "compares with another model than the one that training starts from")


def steps_per_epoch(conversion: Conversion, setting: Setting, rule: Rule, epochs: str) -> None:
    """Set the steps of all epochs."""
    if setting.is_on:
        steps = int(setting.value) * int(conversion.value(epochs) or 1)
        conversion.take(setting, "train.max_steps", steps, computed=f"{setting.value} x {epochs}")
    else:
        conversion.drop(setting, "asks for nothing")


def column_map(conversion: Conversion, setting: Setting, rule: Rule) -> None:
    """Take columns by the fields that they are."""
    fields = {"output": "answer", "chosen": "chosen", "rejected": "rejected", "prompt": "prompt"}
    item = conversion.source("train", setting)
    for field, column in (setting.value or {}).items():
        if field == "input":
            item["prompt"] = f"{{{column}}}"
        elif field == "instruction":
            item["prompt"] = item.get("prompt", "").replace("{instruction}", f"{{{column}}}") or f"{{{column}}}"
        elif field in fields:
            item[f"columns.{fields[field]}"] = column
        else:
            conversion.refuse(setting, f"maps {field}, which is no field here")
            return
    conversion.add("taken", setting, f"data.columns: {setting.value}")


def conversations(conversion: Conversion, setting: Setting, rule: Rule) -> None:
    """Take the column of the turns."""
    style = conversion.value(setting.key.removesuffix("column") + "style")
    field = "messages" if style == "openai" else "conversations"
    conversion.take(setting, f"@train.columns.{field}", setting.value)


def logger(conversion: Conversion, setting: Setting, rule: Rule) -> None:
    """Turn on Weights & Biases; the others write files, as every run does."""
    if "WandB" in str(setting.value):
        conversion.take(setting, "logging.observers", {"wandb": True})
    else:
        conversion.drop(setting, "events.jsonl and curves for TensorBoard have every figure")
