"""Accelerate files as people have them, and machines to read them on."""

from __future__ import annotations

import json
from pathlib import Path

from trainwright.compatibility.accelerate.translation import Translation, read_translation
from trainwright.machine.machine import Gpu, Machine

CPU = Machine("here", "Some CPU", 4, 16 * 2**30, ())
LOOSE_DDP = """{
  "compute_environment": "LOCAL_MACHINE",
  "debug": false,
  "distributed_type": "MULTI_GPU",
  "downcast_bf16": false,
  "machine_rank": 0,
  "main_training_function": "main",
  "mixed_precision": "bf16",
  "num_machines": 1,
  "num_processes": 4,
  "rdzv_backend": "c10d",
  "same_network": True,
  "tpu_use_cluster": false,
  "tpu_use_sudo": false,
  "use_cpu": false
}
"""
FSDP_1 = """compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
enable_cpu_affinity: false
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_cpu_ram_efficient_loading: true
  fsdp_forward_prefetch: true
  fsdp_offload_params: true
  fsdp_sharding_strategy: FULL_SHARD
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_sync_module_states: true
  fsdp_transformer_layer_cls_to_wrap: Phi3DecoderLayer
  fsdp_use_orig_params: true
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 4
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""
FSDP_2 = """distributed_type: FSDP
use_cpu: true
mixed_precision: no
num_processes: 4
fsdp_config:
  fsdp_version: 2
  fsdp_reshard_after_forward: false
  fsdp_activation_checkpointing: true
  fsdp_transformer_layer_cls_to_wrap: [LlamaDecoderLayer, Embedding]
"""
TWO_NODES = """compute_environment: LOCAL_MACHINE
deepspeed_config:
  deepspeed_config_file: zero3.json
  deepspeed_multinode_launcher: standard
  zero3_init_flag: true
distributed_type: DEEPSPEED
machine_rank: 1
main_process_ip: "192.168.1.1"
main_process_port: 18765
num_machines: 2
num_processes: 8
use_cpu: false
"""
ZERO_3 = {
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
    "bf16": {"enabled": "auto"},
    "train_batch_size": "auto",
    "gradient_accumulation_steps": "auto",
}
INLINE_ZERO = """distributed_type: DEEPSPEED
use_cpu: true
mixed_precision: fp16
num_processes: 2
deepspeed_config:
  zero_stage: 2
  gradient_accumulation_steps: 4
  gradient_clipping: 0.5
  offload_optimizer_device: cpu
  offload_param_device: none
  zero3_init_flag: false
"""
TWO_CPU = """distributed_type: MULTI_CPU
use_cpu: true
num_machines: 1
num_processes: 2
mixed_precision: 'no'
"""
LOWER_CASE = (
    "compute_environment: local_machine\ndistributed_type: multi_gpu\nmixed_precision: bf16\nnum_processes: 2\n"
)


def gpus(count: int) -> Machine:
    return Machine("here", "Some CPU", 16, 64 * 2**30, (Gpu("Some GPU", 80 * 2**30, (9, 0)),) * count)


def written(directory: Path, text: str, name: str = "accelerate.yaml") -> Path:
    """The file, and beside it the DeepSpeed file that some of the above name."""
    (directory / "zero3.json").write_text(json.dumps(ZERO_3))
    (directory / name).write_text(text, encoding="utf-8")
    return directory / name


def translation(directory: Path, text: str, name: str = "accelerate.yaml") -> Translation:
    return read_translation(written(directory, text, name))


def values(found: Translation) -> dict[str, object]:
    """Recipe keys and their values."""
    return {key: setting.value for key, setting in found.settings.items()}


def problems(found: Translation) -> str:
    return "\n".join(problem.text for problem in found.problems)
