"""One SFT run under TRL on a GPU, started by bench/gpu_peers.py.

Usage: python gpu_trl.py JOB.json, where the job names the model, the texts, the tokens of a pack, the packs of a step
and of a micro-batch, the adapter (none, lora or qlora), and the file for the result.

TRL at its best: packs, Liger's kernels, the newest FlashAttention that is installed, fused AdamW, no recomputation.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from datasets import load_dataset
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer
from trl_sft import CountingCollator, ObservedTrainer, StepClock, effective_settings

JOB: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
ATTENTION = ("flash_attention_4", "flash_attention_3", "flash_attention_2", "sdpa")
ON_GPU = torch.cuda.is_available()


class DeviceClock(StepClock):
    """The time at which the GPU has finished each step."""

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        if ON_GPU:
            torch.cuda.synchronize()
        super().on_step_end()


def train(model: Any, peft_config: Any, trainer_class: type[SFTTrainer], *, liger: bool) -> None:
    """Train the job's steps, and write the result."""
    accumulation = JOB["packs"] // JOB["micro_batch"]
    config = SFTConfig(
        output_dir=JOB["output_directory"],
        use_cpu=not ON_GPU,
        max_steps=JOB["steps"],
        per_device_train_batch_size=JOB["micro_batch"],
        gradient_accumulation_steps=accumulation,
        packing=True,
        packing_strategy="bfd",
        max_length=JOB["pack"],
        bf16=ON_GPU,
        optim="adamw_torch_fused",
        use_liger_kernel=liger,
        loss_type="nll",  # which Liger computes without the logits
        gradient_checkpointing=False,
        report_to="none",
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
    )
    clock = DeviceClock()
    trainer = trainer_class(
        model=model,
        args=config,
        train_dataset=load_dataset("json", data_files=JOB["texts"], split="train"),
        processing_class=AutoTokenizer.from_pretrained(JOB["model"]),
        peft_config=peft_config,
        callbacks=[clock],
    )
    collator = CountingCollator(trainer.data_collator)
    trainer.data_collator = collator
    trainer.train()
    losses = [float(loss) for loss in getattr(trainer, "losses", [])]
    result = {
        "started": JOB["started"],
        "step_ends": clock.step_ends,
        "tokens": by_step(collator.tokens, accumulation),
        "losses": by_step(losses, accumulation),
        "memory_bytes": torch.cuda.max_memory_allocated() if ON_GPU else 0,
        "settings": effective_settings(config, trainer) | {"liger": liger},
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__, "trl": trl.__version__},
        "ended": time.time(),
    }
    Path(JOB["result"]).write_text(json.dumps(result))


def by_step(values: list[Any], accumulation: int) -> list[Any]:
    """The sums of each step's micro-batches; the loader may have read some more than were trained."""
    steps = min(JOB["steps"], len(values) // accumulation)
    return [sum(values[step * accumulation : (step + 1) * accumulation]) for step in range(steps)]


def plain_model() -> tuple[Any, Any]:
    """The model as transformers loads it, and the adapter's configuration."""
    from peft import LoraConfig

    options: dict[str, Any] = {"dtype": torch.bfloat16 if JOB["adapter"] != "none" else torch.float32}
    if JOB["adapter"] == "qlora":
        from transformers import BitsAndBytesConfig

        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )
    if ON_GPU:
        options["device_map"] = {"": 0}
    model = AutoModelForCausalLM.from_pretrained(JOB["model"], attn_implementation=attention(), **options)
    lora = LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")
    return model, None if JOB["adapter"] == "none" else lora


def attention() -> str:
    """The first of ``ATTENTION`` that is installed."""
    if not ON_GPU:
        return "sdpa"
    config = AutoConfig.from_pretrained(JOB["model"])
    for name in ATTENTION:
        try:
            with torch.device("meta"):
                AutoModelForCausalLM.from_config(config, attn_implementation=name, dtype=torch.bfloat16)
        except (ImportError, ValueError) as error:
            print(f"{name}: {error}", flush=True)
        else:
            return name
    raise SystemExit("transformers has no attention here")


if __name__ == "__main__":
    train(*plain_model(), ObservedTrainer, liger=ON_GPU)
