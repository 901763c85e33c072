"""Other tools' names for keys and values of a recipe, and what to write instead.

The names are from the configurations of transformers' Trainer and TRL, Axolotl, LLaMA-Factory, torchtune, DeepSpeed,
Lightning, Hydra, and the research code that the recipes for unlearning and algorithm distillation follow.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from trainwright.recipe.registries import TASKS


class OwnKey(NamedTuple):
    """A key of ours, and how its value is written: ``value`` in place of true, or a description."""

    key: str
    value: str | None = None
    note: str | None = None

    def shown(self, key: str, value: object = None) -> str:
        """Return the suggestion for a message: our ``key``, for another tool's ``value``."""
        ours = f": {self.value}" if self.value and value is not False else ""
        return f"{key}{ours}{f' ({self.note})' if self.note else ''}"


# By answer, a key of ours or a sentence: other tools' names, separated by spaces.
ANSWERS: dict[OwnKey | str, str] = {
    OwnKey("optimizer.learning_rate"): "lr max_lr peak_lr base_lr init_lr",
    OwnKey("optimizer.name"): "optim optimizer_type optim_type",
    OwnKey("optimizer.schedule"): "lr_scheduler lr_scheduler_type lr_schedule lr_decay_style scheduler scheduler_type",
    OwnKey("optimizer.warmup_steps"): "num_warmup_steps warmup warmup_iters warmup_num_steps lr_warmup_steps",
    OwnKey("optimizer.warmup_steps", note="below 1: a fraction of all steps"): "warmup_ratio warmup_fraction",
    OwnKey("optimizer.decay_steps"): "num_decay_steps lr_decay_steps",
    OwnKey("optimizer.final_learning_rate_ratio"): "min_lr_ratio min_lr_rate cosine_min_lr_ratio final_lr_ratio",
    OwnKey(
        "optimizer.final_learning_rate_ratio", "0.1", "a fraction of learning_rate"
    ): "lr_scheduler_kwargs min_lr lr_min final_lr lr_end",
    OwnKey("optimizer.betas", "[0.9, 0.999]"): "adam_beta1 adam_beta2 beta1 beta2 adam_betas",
    OwnKey("optimizer.eps"): "adam_epsilon adam_eps epsilon",
    OwnKey("optimizer.weight_decay"): "wd adam_weight_decay",
    OwnKey(
        "optimizer.max_grad_norm"
    ): "gradient_clipping gradient_clip_val clip_grad clip_grad_norm grad_clip grad_norm "
    "max_norm max_gradient_norm clip_norm",
    OwnKey(
        "train.micro_batch_size", note="rows per process"
    ): "per_device_train_batch_size per_device_batch_size per_gpu_train_batch_size "
    "train_micro_batch_size_per_gpu train_micro_batch_size device_batch_size batch_size_per_device local_batch_size "
    "mbs",
    OwnKey(
        "train.global_batch_size", note="per GPU: train.micro_batch_size"
    ): "batch_size train_batch_size total_batch_size effective_batch_size train_global_batch_size gbs",
    OwnKey("train.gradient_accumulation_steps"): "gradient_accumulation grad_accum grad_accum_steps "
    "accumulate_grad_batches grad_accumulation_steps",
    OwnKey("train.epochs"): "num_train_epochs num_epochs max_epochs n_epochs epoch total_epochs",
    OwnKey("train.max_steps"): "max_train_steps num_train_steps total_steps num_steps train_steps training_steps "
    "train_timesteps max_steps_per_epoch max_iters train_iters iterations steps",
    OwnKey("train.max_tokens"): "num_tokens train_tokens total_tokens",
    OwnKey(
        "train.mixed_precision", note="of saved weights: model.save_dtype"
    ): "dtype torch_dtype precision compute_dtype amp bnb_4bit_compute_dtype",
    OwnKey("train.mixed_precision", "bf16"): "bf16 bfloat16 use_bf16 pure_bf16 bf16_full_eval",
    OwnKey("train.mixed_precision", "fp16"): "fp16 float16 use_fp16 fp16_full_eval",
    OwnKey("train.tf32"): "allow_tf32 use_tf32 enable_tf32",
    OwnKey("train.activation_checkpointing", "full"): "gradient_checkpointing use_gradient_checkpointing "
    "enable_gradient_checkpointing gradient_checkpointing_kwargs activation_checkpointing_kwargs "
    "enable_activation_checkpointing activation_checkpoint recompute grad_checkpoint",
    OwnKey("train.activation_offload"): "enable_activation_offloading activation_offloading",
    OwnKey("train.compile"): "torch_compile use_compile compile_model",
    OwnKey("train.compile", "true"): "torch_compile_backend torch_compile_mode dynamo_backend",
    OwnKey("train.deterministic"): "full_determinism use_deterministic_algorithms",
    OwnKey("train.seed"): "random_seed data_seed manual_seed random_state",
    OwnKey("data.train"): "dataset datasets dataset_name dataset_path dataset_id train_file train_dataset train_data "
    "data_path data_files train_files training_data train_path",
    OwnKey(
        "data.validation"
    ): "eval_dataset eval_file validation_file validation_dataset val_dataset val_data val_file "
    "val_set_size val_size test_size validation_split test_datasets",
    OwnKey("data.validation", "0.05", "of the rows"): "validation_split_percentage",
    OwnKey("data.max_length"): "max_seq_length max_seq_len seq_length seq_len sequence_len sequence_length cutoff_len "
    "model_max_length block_size max_tokens_per_sample",
    OwnKey("data.max_length", note="of prompt and answer together"): "max_prompt_length",
    OwnKey("data.pack_length", "1024", "tokens per row"): "packing sample_packing packed neat_packing pack "
    "use_packing packed_length padding_free",
    OwnKey("data.stages"): "data_stages curriculum curriculum_learning",
    OwnKey("data.limit"): "max_samples max_train_samples num_samples",
    OwnKey("data.targets", "all", "or answers, the default"): "train_on_inputs train_on_prompt mask_prompt "
    "completion_only_loss assistant_only_loss",
    OwnKey("data.targets", "last"): "mask_history",
    OwnKey("data.system"): "default_system",
    OwnKey("model.name"): "model_name_or_path model_name pretrained_model_name_or_path model_id base_model model_path "
    "pretrained_model checkpoint_path",
    OwnKey("model.added_tokens"): "add_tokens new_special_tokens additional_special_tokens",
    OwnKey("model.tokenizer"): "tokenizer_name tokenizer_name_or_path tokenizer_path tokenizer_id",
    OwnKey("model.config"): "config_overrides model_config",
    OwnKey("model.chat_template"): "template prompt_template",
    OwnKey("model.adapter", "lora"): "peft peft_config lora lora_config use_lora use_peft",
    OwnKey("model.adapter", "qlora"): "qlora use_qlora",
    OwnKey("model.adapter"): "finetuning_type tuner_type",
    OwnKey("model.attention"): "attn_implementation attn_impl attn flash_attn flash_attention attention_backend",
    OwnKey("model.attention", "flash_attention_2"): "use_flash_attention use_flash_attn use_flash_attention_2",
    OwnKey("model.adapter.type", "dora"): "use_dora peft_use_dora",
    OwnKey("model.adapter.rank"): "lora_r lora_rank r peft_lora_r",
    OwnKey("model.adapter.alpha"): "lora_alpha peft_lora_alpha",
    OwnKey("model.adapter.dropout"): "lora_dropout peft_lora_dropout",
    OwnKey(
        "model.adapter.targets"
    ): "target_modules lora_target lora_target_linear lora_target_modules lora_attn_modules",
    OwnKey("model.adapter.modules_to_save"): "lora_modules_to_save additional_target",
    OwnKey("model.adapter.rank_stabilized"): "use_rslora rslora",
    OwnKey(
        "model.adapter.quantization", "nf4"
    ): "load_in_4bit quantization_bit quantization quantize quantization_method quantization_config bnb_config",
    OwnKey("model.adapter.quantization", "int8"): "load_in_8bit",
    OwnKey("optimizer.master_weights", "false"): "bf16_stochastic_round stochastic_rounding",
    OwnKey("model.adapter.quantization", note="nf4 or int8"): "bnb_4bit_quant_type",
    OwnKey("model.adapter.double_quantization"): "bnb_4bit_use_double_quant use_double_quant",
    OwnKey("parallel.deepspeed_config"): "deepspeed ds_config deepspeed_config_file",
    OwnKey(
        "parallel.strategy"
    ): "fsdp fsdp_config fsdp_sharding_strategy ddp distributed_strategy distributed_type distributed_backend "
    "fsdp_version parallelism parallelism_config",
    OwnKey(
        "parallel.num_processes", note="on all nodes"
    ): "nproc_per_node num_gpus n_gpus gpus world_size devices num_workers_per_node dp_size",
    OwnKey("parallel.device", "cpu"): "use_cpu no_cuda cpu",
    OwnKey("parallel.device"): "accelerator",
    OwnKey("parallel.strategy", "zero2", "or zero1, zero3"): "zero_stage deepspeed_stage use_deepspeed",
    OwnKey("parallel.strategy", "fsdp"): "use_fsdp",
    OwnKey("launch.gpus_per_node"): "n_gpus_per_node",
    OwnKey("parallel.wrap", "[CLASS]"): "fsdp_transformer_layer_cls_to_wrap transformer_layer_cls_to_wrap",
    OwnKey("parallel.reshard_after_forward"): "fsdp_reshard_after_forward",
    OwnKey(
        "parallel.offload_parameters"
    ): "fsdp_offload_params fsdp_cpu_offload offload_param cpu_offload param_offload",
    OwnKey("checkpoint.every"): "save_steps save_interval save_every save_freq checkpointing_steps "
    "checkpoint_interval every_n_train_steps ckpt_every_steps ckpt_interval",
    OwnKey("checkpoint.every", "100", "steps, or a time such as 10 min"): "save_strategy saves_per_epoch",
    OwnKey("checkpoint.keep_last"): "save_total_limit keep_n_checkpoints max_checkpoints save_top_k keep_top_k",
    OwnKey("checkpoint.keep_best", "true", "by the lowest validation loss"): "metric_for_best_model greater_is_better",
    OwnKey("checkpoint.keep_best"): "load_best_model_at_end save_best",
    OwnKey("evaluate.every"): "eval_steps eval_interval eval_every eval_freq "
    "val_check_interval run_val_every_n_steps val_every_steps",
    OwnKey(
        "logging.run_directory", note="such as runs/NAME; it must not exist"
    ): "output_dir output_directory run_dir log_dir logging_dir save_dir "
    "out_dir run_name task_name experiment_name exp_name",
    OwnKey("logging.run_directory", "runs/NAME", "it must not exist"): "overwrite_output_dir",
    OwnKey("evaluate.every", "100", "steps, or null"): "eval_strategy evaluation_strategy evals_per_epoch do_eval",
    OwnKey("logging.observers", "{tensorboard: true}"): "tensorboard_dir use_tensorboard tensorboard_enabled",
    OwnKey(
        "logging.observers", "[wandb]", "or mlflow, trackio, or {tensorboard: false}"
    ): "report_to logger with_tracking use_wandb wandb_enabled",
    OwnKey("parallel.offload_optimizer"): "offload_optimizer_device optimizer_offload optimizer_cpu_offload",
    OwnKey("parallel.timeout", note="such as 30 min"): "ddp_timeout timeout_minutes",
    OwnKey("model.adapter.start_from"): "adapter_name_or_path",
    OwnKey("train.profile"): "profiler profile_memory",
    OwnKey("launch.nodes", note="with submit; else train --nodes"): "num_nodes nnodes num_machines",
    OwnKey("sft.loss", "dft"): "use_dft_loss use_dft",
    OwnKey("sft.loss", "eaft"): "use_eaft_loss use_eaft",
    OwnKey("sft.eaft_power"): "eaft_alpha",
    OwnKey("sft.eaft_top"): "eaft_k",
    OwnKey("dpo.beta"): "dpo_beta pref_beta rl_beta",
    OwnKey("dpo.loss"): "loss_type pref_loss dpo_loss",
    OwnKey("dpo.margin"): "simpo_gamma rl_gamma",
    OwnKey("dpo.sft_weight"): "rpo_alpha cpo_alpha pref_ftx sft_alpha",
    OwnKey("dpo.length_normalized"): "dpo_norm average_log_prob",
    OwnKey("unlearn.objective"): "forget_loss forget_method unlearn_method unlearning_method",
    OwnKey("unlearn.retain_loss"): "retain_loss_type",
    OwnKey("algorithm_distillation.model.n_embd"): "tf_n_embd",
    OwnKey("algorithm_distillation.model.n_layer"): "tf_n_layer",
    OwnKey("algorithm_distillation.model.n_head"): "tf_n_head",
    OwnKey("algorithm_distillation.model.dropout"): "tf_dropout tf_attn_dropout",
    OwnKey("algorithm_distillation.context_length"): "n_transit",
    OwnKey("algorithm_distillation.source.streams"): "n_stream train_n_stream",
    OwnKey("algorithm_distillation.source.steps"): "source_timesteps train_source_timesteps total_source_timesteps",
    OwnKey("algorithm_distillation.split_seed"): "env_split_seed",
    OwnKey("algorithm_distillation.test_fraction", "0.2", "1 minus the ratio"): "train_env_ratio",
    "leave it out: rows are tokenized once, then read from files by each process": "num_workers dataloader_num_workers "
    "dataloader_pin_memory pin_memory dataloader_persistent_workers dataloader_prefetch_factor dataloader_in_order "
    "dataloader_multiprocessing_context preprocessing_num_workers dataset_num_proc",
    "leave it out: no row is dropped or repeated": "dataloader_drop_last drop_last ignore_data_skip",
    "leave it out: evaluation has no batch size of its own; if it runs out of memory, it is repeated with half-size "
    "batches": "test_batch_size per_device_eval_batch_size per_gpu_eval_batch_size eval_batch_size batch_size_val "
    "eval_accumulation_steps batch_eval_metrics eval_do_concat_batches eval_use_gather_object",
    "leave it out: train.micro_batch_size: auto is chosen to fit": "auto_find_batch_size torch_empty_cache_steps",
    "leave it out: train.seed decides the order of the rows, and processes get equal shares of tokens": "shuffle "
    "group_by_length train_sampling_strategy length_column_name",
    "leave it out: columns that are not used are named before training": "remove_unused_columns",
    "leave it out: fields are recognized by their names; data.columns names others": "label_names "
    "dataset_text_field field_messages",
    "leave it out: every target counts the same on any number of processes": "average_tokens_across_devices",
    "leave it out: parameters without a gradient count as zero under every strategy": "ddp_find_unused_parameters "
    "find_unused_parameters ddp_static_graph",
    "leave it out on one machine, where a free port is chosen; on several, pass --rendezvous HOST:PORT, the address of "
    "node 0": "main_process_ip main_process_port master_addr master_port rdzv_endpoint rdzv_backend rdzv_conf",
    "pass it on the command line of each node: trainwright train --nodes N --node-rank I": "machine_rank node_rank",
    "hide the other GPUs: CUDA_VISIBLE_DEVICES=0,1 before the command": "gpu_ids cuda_visible_devices visible_devices",
    "leave it out: one process is started for each GPU": "multi_gpu",
    "leave it out: it follows from parallel.strategy": "ddp_bucket_cap_mb ddp_broadcast_buffers ddp_backend backend "
    "local_rank dispatch_batches split_batches fsdp_auto_wrap_policy fsdp_backward_prefetch fsdp_forward_prefetch "
    "fsdp_use_orig_params fsdp_sync_module_states fsdp_cpu_ram_efficient_loading fsdp_state_dict_type",
    "leave it out: the plan places the model; see parallel.strategy and parallel.device": "device_map max_memory",
    "leave it out: there are no other kernels to choose; see train.compile": "use_liger_kernel liger_kernel_config "
    "enable_liger_kernel",
    "leave it out: code that comes with a model is never run": "trust_remote_code",
    "leave it out: training keeps no cache of keys and values": "use_cache",
    "it is not supported; see the keys of optimizer": "optim_args optim_target_modules",
    OwnKey("sft.label_smoothing"): "label_smoothing_factor",
    OwnKey("optimizer.loraplus_ratio"): "loraplus_lr_ratio",
    OwnKey("train.max_loss"): "loss_watchdog_threshold",
    OwnKey("train.max_loss_steps"): "loss_watchdog_patience",
    OwnKey("evaluate.early_stopping.patience"): "early_stopping_patience",
    OwnKey("model.adapter.layers"): "layers_to_transform",
    OwnKey("model.adapter.initialization"): "init_lora_weights",
    "it is not supported; model.adapter.modules_to_save trains modules in full": "bias lora_bias",
    "leave it out: adapters are for causal language models": "task_type inference_mode",
    "it is not supported; parallel.strategy lists how a model can be distributed": "tensor_parallel_size tp_size "
    "tensor_model_parallel_size pipeline_parallel_size pp_size pipeline_model_parallel_size context_parallel_size "
    "cp_size expert_parallel_size expert_model_parallel_size ep_size sequence_parallel sequence_parallel_size",
    "leave it out: every step is recorded": "logging_steps logging_strategy logging_first_step log_every_n_steps "
    "log_interval summary_interval include_num_input_tokens_seen skip_memory_metrics log_peak_memory_stats",
    "leave it out; faults.on_non_finite is for losses that are NaN or infinite": "logging_nan_inf_filter",
    "leave it out: every rank has a log in the run directory": "log_level log_level_replica log_on_each_node "
    "disable_tqdm debug",
    "set it in the environment of the command, such as WANDB_PROJECT or TRACKIO_PROJECT": "project project_name "
    "wandb_project",
    "it is not supported: trackio keeps its figures on this machine": "trackio_space_id trackio_bucket_id "
    "trackio_static_space_id",
    "leave it out: the model is evaluated before and after training, and every evaluate.every steps": "eval_on_start "
    "eval_delay initial_validation val_before_train",
    "leave it out; evaluate.metrics lists metrics of answers": "prediction_loss_only compute_metrics "
    "include_for_metrics include_inputs_for_metrics predict_with_generate",
    "leave it out: checkpoints have all that a resumed run needs, and final/ has the model alone": "save_only_model "
    "save_on_each_node save_safetensors enable_jit_checkpoint model_save_format save_consolidated",
    "publish the model after the run: trainwright push RUN OWNER/NAME": "push_to_hub hub_token hub_private_repo "
    "hub_model_id hub_strategy hub_always_push hub_revision",
    "resume a run with trainwright train --resume RUN": "resume_from_checkpoint resume "
    "restore_callback_states_from_checkpoint",
    "leave it out: the command says what to do, such as trainwright train, eval or generate": "do_train do_predict",
    "pass an Accelerate file: trainwright train --accelerate-config FILE": "accelerator_config accelerate_config",
    "the recipe file is what Hydra calls an experiment: trainwright train RECIPE": "experiment config_name config_path",
    "it is Hydra's; include: FILE merges other files": "defaults",
    "it is Hydra's; leave it out": "hydra _target_ _partial_ _convert_",
    "set task: unlearn and unlearn.objective": "handler trainer",
}

# By key: other tools' names of its values; those of tasks are in their specs.
_VALUES: dict[str, dict[str, str]] = {
    "optimizer.name": {
        "adam": "adamw",
        "adamw_torch": "adamw",
        "adamw_torch_fused": "adamw",
        "adamw_hf": "adamw",
        "torch.optim.adamw": "adamw",
        "paged_adamw": "adamw",
        "paged_adamw_32bit": "adamw",
        "adamw_bnb_8bit": "adamw_8bit",
        "rmsprop_bnb": "rmsprop",
        "paged_ademamix_32bit": "ademamix",
        "paged_adamw_8bit": "adamw_8bit",
        "lion_32bit": "lion",
        "paged_lion_32bit": "lion",
        "paged_lion_8bit": "lion_8bit",
    },
    "optimizer.schedule": {
        "wsd": "warmup_stable_decay",
        "trapezoidal": "warmup_stable_decay",
        "constant_with_warmup": "constant",
        "cosine_with_min_lr": "cosine",
        "linear_with_warmup": "linear",
        "cosine_with_warmup": "cosine",
        "cosine_with_restarts": "cosine_restarts",
        "inverse_square_root": "inverse_sqrt",
        "reduce_lr_on_plateau": "reduce_on_plateau",
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
    "model.adapter.targets": {"all": "all-linear"},
    "parallel.device": {
        "gpu": "cuda",
        "nvidia": "cuda",
        "amd": "cuda",
        "rocm": "cuda",
        "cuda:0": "cuda",
        "intel": "xpu",
    },
}

# Mappings of other tools, of which each key is answered for itself, and our section that is tried first.
SECTIONS: dict[str, str] = {
    **dict.fromkeys(("trainer", "args", "training_args", "training_arguments", "trainer_args", "training"), "train"),
    **dict.fromkeys(("hparams", "hyperparameters", "sft_config", "dpo_config", "sft_args"), "train"),
    **dict.fromkeys(("optim", "lr_scheduler", "scheduler", "optimizer_config", "optim_args"), "optimizer"),
    **dict.fromkeys(("lora", "peft", "lora_config", "peft_config", "lora_args"), "model.adapter"),
    **dict.fromkeys(("quantization_config", "bnb_config"), "model.adapter"),
    **dict.fromkeys(("model_args", "model_kwargs"), "model"),
    **dict.fromkeys(("data_args", "dataset_args"), "data"),
    **dict.fromkeys(("fsdp_config", "distributed"), "parallel"),
}

# The key that a word in place of a whole section means, as in Hydra's choice of a group.
SECTION_WORDS = {"model": "name", "data": "train", "optimizer": "name", "parallel": "strategy"}


def our_key(name: str) -> OwnKey | str | None:
    """Return our key for a key of another tool, or a sentence that says what to do instead; None if unknown."""
    return _by_name().get(name.lower().replace("-", "_"))


def our_value(key: str, value: object) -> str | None:
    """Return our value of a dotted ``key`` for another tool's value; None if unknown."""
    name = str(value).lower()
    if key == "task":
        return next((task for task in TASKS.names() if name in TASKS.get(task).also_called), None)
    if key in SECTION_WORDS and isinstance(value, str):
        return f"{key}.{SECTION_WORDS[key]}={value}"
    return _VALUES.get(key, {}).get(name)


@cache
def _by_name() -> dict[str, OwnKey | str]:
    return {name: answer for answer, names in ANSWERS.items() for name in names.split()}
