"""One SFT run under Unsloth on a GPU, started by bench/gpu_peers.py with a job like that of gpu_trl.py."""

from __future__ import annotations

import unsloth  # before what it replaces
from gpu_trl import JOB, train
from trl import SFTTrainer

ENDS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def main() -> None:
    full = JOB["adapter"] == "none"
    model, _ = unsloth.FastLanguageModel.from_pretrained(
        JOB["model"], max_seq_length=JOB["pack"], load_in_4bit=JOB["adapter"] == "qlora", full_finetuning=full
    )
    if not full:
        lora = {"r": 16, "lora_alpha": 32, "lora_dropout": 0.0, "target_modules": ENDS}
        model = unsloth.FastLanguageModel.get_peft_model(model, **lora, use_gradient_checkpointing=False)
    train(model, None, SFTTrainer, liger=False)


if __name__ == "__main__":
    main()
