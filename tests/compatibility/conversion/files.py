"""Small configurations of other tools, written for these tests."""

from __future__ import annotations

import json
from pathlib import Path

AXOLOTL = """\
base_model: owner/small
datasets:
  - path: rows.jsonl
    ds_type: json
    type: alpaca
  - path: owner/chats
    split: train[:10%]
    type: alpaca
val_set_size: 0.1
sequence_len: 256
adapter: qlora
load_in_4bit: true
lora_r: 8
lora_alpha: 16
lora_target_linear: true
micro_batch_size: 2
gradient_accumulation_steps: 4
num_epochs: 2
optimizer: paged_adamw_8bit
lr_scheduler: cosine
cosine_min_lr_ratio: 0.1
learning_rate: 2e-4
warmup_ratio: 0.1
weight_decay: 0.01
bf16: true
gradient_checkpointing: true
flash_attention: true
logging_steps: 1
wandb_project: mine
special_tokens:
  pad_token: <pad>
"""

LLAMA_FACTORY = """\
model_name_or_path: owner/small
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 4
lora_target: q_proj,v_proj
dataset: mine,chats
template: chatml
cutoff_len: 128
max_samples: 50
val_size: 0.2
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
eval_strategy: steps
eval_steps: 20
plot_loss: true
deepspeed: ds_z2_offload_config.json
"""

INFOS = {
    "mine": {"file_name": "mine.json"},
    "chats": {
        "hf_hub_url": "owner/chats",
        "formatting": "sharegpt",
        "columns": {"messages": "talk", "system": "setting"},
    },
}

TRL = """\
model_name_or_path: owner/small
torch_dtype: bfloat16
dataset_name: owner/chats
max_length: 512
per_device_train_batch_size: 4
gradient_accumulation_steps: 2
learning_rate: 5.0e-06
lr_scheduler_type: cosine_with_min_lr
lr_scheduler_kwargs:
  min_lr: 5.0e-07
max_steps: -1
num_train_epochs: 1
gradient_checkpointing_kwargs:
  use_reentrant: false
report_to:
- wandb
use_liger_kernel: true
save_strategy: epoch
"""

TORCHTUNE = """\
output_dir: /tmp/out
model:
  _component_: torchtune.models.llama3_2.lora_llama3_2_1b
  lora_attn_modules: [q_proj, v_proj, output_proj]
  apply_lora_to_mlp: true
  lora_rank: 8
  lora_alpha: 16
tokenizer:
  _component_: torchtune.models.llama3.llama3_tokenizer
  path: ${checkpointer.checkpoint_dir}/tokenizer.model
  max_seq_len: 256
checkpointer:
  _component_: torchtune.training.FullModelHFCheckpointer
  checkpoint_dir: /models/small
  output_dir: ${output_dir}
dataset:
  _component_: torchtune.datasets.alpaca_dataset
  packed: false
optimizer:
  _component_: torch.optim.AdamW
  fused: true
  lr: 3e-4
lr_scheduler:
  _component_: torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup
  num_warmup_steps: 10
loss:
  _component_: torchtune.modules.loss.LinearCrossEntropyLoss
batch_size: 2
gradient_accumulation_steps: 4
epochs: 1
seed: null
dtype: bf16
device: cpu
enable_activation_checkpointing: true
"""

UNSLOTH = """\
from unsloth import FastLanguageModel
from trl import SFTConfig, SFTTrainer
from datasets import load_dataset

open("ran", "w").close()
max_seq_length = 512
model, tokenizer = FastLanguageModel.from_pretrained(
    model_name="owner/small",
    max_seq_length=max_seq_length,
    load_in_4bit=True,
)
model = FastLanguageModel.get_peft_model(
    model,
    r=16,
    target_modules=["q_proj", "v_proj"],
    lora_alpha=2 * 16,
    lora_dropout=0,
    bias="none",
    use_gradient_checkpointing="unsloth",
    random_state=3407,
)
dataset = load_dataset("owner/chats", split="train")


def write(rows):
    return {"text": [tokenizer.apply_chat_template(row, tokenize=False) for row in rows["messages"]]}


dataset = dataset.map(write, batched=True)
trainer = SFTTrainer(
    model=model,
    tokenizer=tokenizer,
    train_dataset=dataset,
    args=SFTConfig(
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        warmup_steps=5,
        max_steps=60,
        learning_rate=2e-4,
        optim="adamw_8bit",
        weight_decay=0.001,
        lr_scheduler_type="linear",
        seed=3407,
        report_to="none",
    ),
)
"""


def write_all(folder: Path) -> None:
    """Write a file of each tool, each in a folder of its own."""
    for name, text in (("axolotl.yaml", AXOLOTL), ("trl.yaml", TRL), ("tune.yaml", TORCHTUNE), ("unsloth.py", UNSLOTH)):
        (folder / name).write_text(text)
    write_llama_factory(folder)


def write_llama_factory(folder: Path) -> Path:
    """Write a configuration, its list of data sets, and return its path."""
    (folder / "data").mkdir()
    (folder / "data" / "dataset_info.json").write_text(json.dumps(INFOS))
    (folder / "factory.yaml").write_text(LLAMA_FACTORY)
    return folder / "factory.yaml"


def write_hydra(folder: Path) -> Path:
    """Write configurations that Hydra composes, and return the path of an experiment."""
    files = {
        "unlearn.yaml": "defaults:\n  - model: large\n  - trainer: finetune\n  - data: unlearn\n  - experiment: null\n"
        "  - _self_\nmode: unlearn\ntask_name: ???\n",
        "model/large.yaml": "model_args: {pretrained_model_name_or_path: owner/large, torch_dtype: bfloat16}\n"
        "template_args: {apply_chat_template: true}\n",
        "model/small.yaml": "model_args: {pretrained_model_name_or_path: owner/small, torch_dtype: bfloat16}\n"
        "template_args: {apply_chat_template: true, system_prompt: Be kind.}\n",
        "trainer/finetune.yaml": "handler: FinetuneTrainer\nargs: {per_device_train_batch_size: 4, "
        "learning_rate: 1e-5, num_train_epochs: 10, optim: paged_adamw_32bit, bf16: true, seed: 0, "
        "output_dir: '${out}'}\n",
        "trainer/NPO.yaml": "defaults:\n  - finetune\nhandler: NPO\nmethod_args: {beta: 0.2, alpha: 1.0, gamma: 1.0}\n",
        "data/unlearn.yaml": "defaults:\n  - datasets@forget: tofu_forget\n  - datasets@retain: tofu_retain\n"
        "anchor: forget\n",
        "data/datasets/tofu_forget.yaml": "rows_forget:\n  handler: QADataset\n  args:\n    hf_args: "
        "{path: owner/tofu, name: forget10, split: train}\n    question_key: question\n    max_length: 128\n",
        "data/datasets/tofu_other.yaml": "rows_other:\n  handler: QADataset\n  args:\n    hf_args: "
        "{path: owner/other, name: retain90, split: train}\n    max_length: 128\n",
        "data/datasets/tofu_retain.yaml": "rows_retain:\n  handler: QADataset\n  args:\n    hf_args: "
        "{path: owner/tofu, name: retain90, split: train}\n    max_length: 128\n",
        "experiment/unlearn/mine.yaml": "# @package _global_\n\ndefaults:\n  - override /model: small\n"
        "  - override /trainer: NPO\n  - override /data/datasets@data.retain: tofu_other\n\n"
        "forget_split: forget05\ndata:\n  forget:\n    rows_forget:\n      args:\n"
        "        hf_args:\n          name: ${forget_split}\ntrainer:\n  args:\n    warmup_epochs: 1.0\n",
    }
    for name, text in files.items():
        path = folder / "configs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder / "configs" / "experiment" / "unlearn" / "mine.yaml"
