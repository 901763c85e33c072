"""Keys of a DeepSpeed file that are not supported but have no effect at their default values.

The defaults are those of DeepSpeed 0.19.
"""

from __future__ import annotations

from typing import Any

# With dots for keys inside a section.
DEFAULTS: dict[str, Any] = {
    "communication_data_type": None,
    "data_types.grad_accum_dtype": None,
    "dataloader_drop_last": False,
    "disable_allgather": False,
    "disable_python_gc": False,
    "fp32_allreduce": False,
    "legacy_fusion": False,
    "load_universal_checkpoint": False,
    "seq_parallel_communication_data_type": "fp32",
    "sparse_attention": None,
    "sparse_gradients": False,
    "use_data_before_expert_parallelism": False,
    "vocabulary_size": None,
    "bf16.bf16_master_weights_and_grads": False,
    "bf16.bf16_optimizer_states": False,
    "bf16.check_grad_overflow": False,
    "bf16.immediate_grad_update": True,
    "fp16.auto_cast": False,
    "fp16.consecutive_hysteresis": False,
    "fp16.fp16_master_weights_and_grads": False,
    "optimizer.legacy_fusion": False,
    "optimizer.params.amsgrad": False,
    "optimizer.params.bias_correction": True,
    "optimizer.params.max_grad_norm": 0,
    "scheduler.params.last_batch_iteration": -1,
    "zero_optimization.compute_grad_norm": True,
    "zero_optimization.cpu_offload": False,
    "zero_optimization.cpu_offload_param": False,
    "zero_optimization.cpu_offload_use_pin_memory": False,
    "zero_optimization.elastic_checkpoint": False,
    "zero_optimization.legacy_stage1": False,
    "zero_optimization.load_from_fp32_weights": True,
    "zero_optimization.mics_hierarchical_params_gather": False,
    "zero_optimization.mics_shard_size": -1,
    "zero_optimization.override_module_apply": True,
    "zero_optimization.pipeline_loading_checkpoint": False,
    "zero_optimization.save_muon_momentum_buffer_in_memory": False,
    "zero_optimization.use_all_reduce_for_fetch_params": False,
    "zero_optimization.zenflow": None,
    "zero_optimization.zero_hpz_partition_size": 1,
    "zero_optimization.zero_quantized_gradients": False,
    "zero_optimization.zero_quantized_nontrainable_weights": False,
    "zero_optimization.zero_quantized_weights": False,
}
# Sections of DeepSpeed that have no effect while `enabled` is false, the default.
_OPTIONAL = {
    "amp",
    "autotuning",
    "comet",
    "comms_logger",
    "csv_monitor",
    "curriculum_learning",
    "data_efficiency",
    "eigenvalue",
    "elasticity",
    "flops_profiler",
    "hybrid_engine",
    "progressive_layer_drop",
    "quantize_training",
    "tensorboard",
    "torch_autocast",
    "wandb",
    "weight_quantization",
}


def is_harmless(key: str, value: Any) -> bool:
    """Return whether a value equals DeepSpeed's default. ``key``: with dots inside a section."""
    if key in DEFAULTS:
        return type(value) is type(DEFAULTS[key]) and value == DEFAULTS[key]
    return key in _OPTIONAL and isinstance(value, dict) and value.get("enabled", False) is False
