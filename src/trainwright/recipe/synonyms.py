"""Other tools' names for keys and values of a recipe, to suggest the right ones.

The names are from the configurations of transformers' Trainer and TRL, Axolotl, LLaMA-Factory, torchtune, DeepSpeed and
Lightning.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from trainwright.registries import TASKS


class OwnKey(NamedTuple):
    """A key of ours, and how its value is written: ``value`` in place of true, or a description."""

    key: str
    value: str | None = None
    note: str | None = None

    def shown(self, key: str) -> str:
        """Return the suggestion for a message, for another tool's ``key``."""
        return f"{key}{f': {self.value}' if self.value else ''}{f' ({self.note})' if self.note else ''}"


_KEYS: dict[OwnKey, str] = {
    OwnKey("optimizer.learning_rate"): "lr max_lr peak_lr base_lr init_lr",
    OwnKey("optimizer.name"): "optim optimizer_type optim_type",
    OwnKey("optimizer.schedule"): "lr_scheduler lr_scheduler_type lr_schedule lr_decay_style scheduler scheduler_type",
    OwnKey("optimizer.warmup_steps"): "num_warmup_steps warmup warmup_iters warmup_num_steps lr_warmup_steps",
    OwnKey("optimizer.warmup_steps", note="below 1: a fraction of all steps"): "warmup_ratio warmup_fraction",
    OwnKey("optimizer.decay_steps"): "num_decay_steps lr_decay_steps",
    OwnKey("optimizer.final_learning_rate_ratio"): "min_lr_ratio min_lr_rate cosine_min_lr_ratio final_lr_ratio",
    OwnKey("optimizer.final_learning_rate_ratio", note="a fraction of learning_rate"): "min_lr lr_min final_lr lr_end",
    OwnKey("optimizer.betas", note="a list of two"): "adam_beta1 adam_beta2 beta1 beta2 adam_betas",
    OwnKey("optimizer.eps"): "adam_epsilon adam_eps epsilon",
    OwnKey("optimizer.weight_decay"): "wd adam_weight_decay",
    OwnKey(
        "optimizer.max_grad_norm"
    ): "gradient_clipping gradient_clip_val clip_grad clip_grad_norm grad_clip grad_norm "
    "max_norm max_gradient_norm clip_norm",
    OwnKey("train.micro_batch_size"): "per_device_train_batch_size per_device_batch_size per_gpu_train_batch_size "
    "train_micro_batch_size_per_gpu device_batch_size batch_size_per_device mbs",
    OwnKey("train.global_batch_size"): "batch_size train_batch_size total_batch_size effective_batch_size gbs",
    OwnKey("train.gradient_accumulation_steps"): "gradient_accumulation grad_accum grad_accum_steps "
    "accumulate_grad_batches grad_accumulation_steps",
    OwnKey("train.epochs"): "num_train_epochs num_epochs max_epochs n_epochs epoch total_epochs",
    OwnKey("train.max_steps"): "max_train_steps num_train_steps total_steps num_steps train_steps training_steps "
    "max_steps_per_epoch max_iters train_iters iterations steps",
    OwnKey("train.max_tokens"): "num_tokens train_tokens total_tokens",
    OwnKey("train.mixed_precision"): "dtype torch_dtype precision compute_dtype amp",
    OwnKey("train.mixed_precision", "bf16"): "bf16 bfloat16 use_bf16 pure_bf16",
    OwnKey("train.mixed_precision", "fp16"): "fp16 float16 use_fp16",
    OwnKey("train.tf32"): "allow_tf32 use_tf32 enable_tf32",
    OwnKey("train.activation_checkpointing", "full"): "gradient_checkpointing use_gradient_checkpointing "
    "enable_gradient_checkpointing enable_activation_checkpointing activation_checkpoint recompute grad_checkpoint",
    OwnKey("train.activation_offload"): "enable_activation_offloading activation_offloading",
    OwnKey("train.compile"): "torch_compile use_compile compile_model",
    OwnKey("train.deterministic"): "full_determinism use_deterministic_algorithms",
    OwnKey("train.seed"): "random_seed data_seed manual_seed",
    OwnKey("data.train"): "dataset datasets dataset_name dataset_path dataset_id train_file train_dataset train_data "
    "data_path data_files training_data train_path",
    OwnKey(
        "data.validation"
    ): "eval_dataset eval_file validation_file validation_dataset val_dataset val_data val_file "
    "val_set_size val_size test_size validation_split test_datasets validation_split_percentage",
    OwnKey("data.max_length"): "max_seq_length max_seq_len seq_length seq_len sequence_len sequence_length cutoff_len "
    "model_max_length block_size context_length max_tokens_per_sample",
    OwnKey("data.pack_length", note="tokens per row"): "packing sample_packing packed neat_packing pack use_packing "
    "packed_length",
    OwnKey("data.limit"): "max_samples max_train_samples num_samples",
    OwnKey("model.name"): "model_name_or_path model_name pretrained_model_name_or_path model_id base_model model_path "
    "pretrained_model checkpoint_path",
    OwnKey("model.tokenizer"): "tokenizer_name tokenizer_name_or_path tokenizer_path tokenizer_id",
    OwnKey("model.config"): "config_overrides model_config config_name",
    OwnKey("model.chat_template"): "template prompt_template",
    OwnKey("model.adapter"): "peft peft_config lora lora_config qlora use_lora use_peft adapter finetuning_type",
    OwnKey("model.adapter.type", "dora"): "use_dora peft_use_dora",
    OwnKey("model.adapter.rank"): "lora_r lora_rank r peft_lora_r",
    OwnKey("model.adapter.alpha"): "lora_alpha peft_lora_alpha",
    OwnKey("model.adapter.dropout"): "lora_dropout peft_lora_dropout",
    OwnKey("model.adapter.targets"): "target_modules lora_target lora_target_modules lora_attn_modules",
    OwnKey("model.adapter.modules_to_save"): "lora_modules_to_save additional_target",
    OwnKey("model.adapter.rank_stabilised"): "use_rslora rslora",
    OwnKey("model.adapter.quantisation", "nf4"): "load_in_4bit quantization_bit quantization quantize",
    OwnKey("model.adapter.quantisation", "int8"): "load_in_8bit",
    OwnKey("model.adapter.double_quantisation"): "bnb_4bit_use_double_quant use_double_quant",
    OwnKey("parallel.deepspeed_config"): "deepspeed ds_config deepspeed_config_file",
    OwnKey("parallel.strategy"): "fsdp fsdp_config ddp distributed_strategy distributed_type distributed_backend "
    "zero_stage fsdp_version parallelism",
    OwnKey("parallel.num_processes"): "nproc_per_node num_gpus n_gpus gpus world_size devices num_workers_per_node",
    OwnKey("parallel.device"): "use_cpu no_cuda accelerator device_map",
    OwnKey("parallel.wrap"): "fsdp_transformer_layer_cls_to_wrap transformer_layer_cls_to_wrap",
    OwnKey("parallel.reshard_after_forward"): "fsdp_reshard_after_forward",
    OwnKey("parallel.offload_parameters"): "fsdp_offload_params fsdp_cpu_offload offload_param",
    OwnKey("checkpoint.every"): "save_steps save_interval save_every save_freq checkpointing_steps saves_per_epoch "
    "save_strategy checkpoint_interval every_n_train_steps",
    OwnKey("checkpoint.keep_last"): "save_total_limit keep_n_checkpoints max_checkpoints save_top_k",
    OwnKey("checkpoint.keep_best"): "load_best_model_at_end save_best",
    OwnKey("evaluate.every"): "eval_steps eval_strategy evaluation_strategy eval_interval eval_every eval_freq "
    "evals_per_epoch val_check_interval run_val_every_n_steps do_eval",
    OwnKey("logging.run_directory"): "output_dir output_directory run_dir log_dir logging_dir save_dir out_dir",
    OwnKey("logging.tensorboard"): "report_to tensorboard_dir use_tensorboard",
}

# By key: other tools' names of its values; those of tasks are in their specs.
_VALUES: dict[str, dict[str, str]] = {
    "optimizer.name": {
        "adam": "adamw",
        "adamw_torch": "adamw",
        "adamw_torch_fused": "adamw",
        "adamw_hf": "adamw",
        "torch.optim.adamw": "adamw",
    },
    "optimizer.schedule": {
        "wsd": "warmup_stable_decay",
        "trapezoidal": "warmup_stable_decay",
        "constant_with_warmup": "constant",
        "cosine_with_min_lr": "cosine",
        "linear_with_warmup": "linear",
        "cosine_with_warmup": "cosine",
    },
    "train.mixed_precision": {
        "bfloat16": "bf16",
        "bf16-mixed": "bf16",
        "torch.bfloat16": "bf16",
        "float16": "fp16",
        "half": "fp16",
        "16-mixed": "fp16",
        "fp32": "no",
        "float32": "no",
        "32": "no",
        "none": "no",
        "false": "no",
    },
    "train.activation_checkpointing": {"true": "full", "false": "none", "unsloth": "full"},
    "parallel.strategy": {
        "dp": "ddp",
        "distributed_data_parallel": "ddp",
        "fsdp2": "fsdp",
        "full_shard": "fsdp",
        "deepspeed": "zero3",
        "deepspeed_stage_1": "zero1",
        "deepspeed_stage_2": "zero2",
        "deepspeed_stage_3": "zero3",
        "none": "single",
    },
    "parallel.device": {"gpu": "cuda", "nvidia": "cuda", "cuda:0": "cuda"},
}


def our_key(name: str) -> OwnKey | None:
    """Return our key for a key of another tool; None if unknown."""
    return _by_name().get(name.lower().replace("-", "_"))


def our_value(key: str, value: object) -> str | None:
    """Return our value of a dotted ``key`` for another tool's value; None if unknown."""
    name = str(value).lower()
    if key == "task":
        return next((task for task in TASKS.names() if name in TASKS.get(task).also_called), None)
    return _VALUES.get(key, {}).get(name)


@cache
def _by_name() -> dict[str, OwnKey]:
    return {name: ours for ours, names in _keys().items() for name in names.split()}


def _keys() -> dict[OwnKey, str]:
    of_tasks = {OwnKey(key): names for task in TASKS.names() for key, names in TASKS.get(task).other_keys.items()}
    return {**_KEYS, **of_tasks}
