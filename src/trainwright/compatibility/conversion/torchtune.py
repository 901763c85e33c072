"""What the table of torchtune computes."""

from __future__ import annotations

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
    if conversion.is_on("tokenizer.prompt_template") or str(conversion.value("dataset._component_")).endswith(
        "text_completion_dataset"
    ):
        return
    name = str(setting.value).rpartition(".")[2]
    template = next((ours for word, ours in _TEMPLATES.items() if name.startswith(word)), "plain")
    conversion.take(setting, "model.chat_template", template)


def prompt_template(conversion: Conversion, setting: Setting, rule: Rule) -> None:
    """Take the template that is named."""
    name = str(setting.value).rpartition(".")[2].lower()
    named = {"chatmltemplate": "chatml", "llama2chattemplate": "llama2", "mistralchattemplate": "mistral"}
    if not setting.is_on:
        conversion.drop(setting, "asks for nothing")
    elif name in named:
        conversion.take(setting, "model.chat_template", named[name])
    else:
        conversion.refuse(setting, "writes marks of its own around the turns")


def max_length(conversion: Conversion, setting: Setting, rule: Rule) -> None:
    """Take the maximum length, which a recipe always has."""
    if isinstance(setting.value, int):
        conversion.take(setting, "data.max_length", setting.value)
    else:
        conversion.need(setting, "does not limit the length of examples: pass tokenizer.max_seq_len=N")


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
    field = "messages" if conversion.value("dataset.conversation_style") == "openai" else "conversations"
    conversion.take(setting, f"@train.columns.{field}", setting.value)


def logger(conversion: Conversion, setting: Setting, rule: Rule) -> None:
    """Turn on Weights & Biases; the others write files, as every run does."""
    if "WandB" in str(setting.value):
        conversion.take(setting, "logging.observers", {"wandb": True})
    else:
        conversion.drop(setting, "events.jsonl and curves for TensorBoard have every figure")
