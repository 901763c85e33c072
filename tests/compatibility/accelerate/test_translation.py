"""What a file means: recipe keys, what is ignored and why, what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.compatibility.accelerate import files
from tests.compatibility.accelerate.files import problems, translation, values, written
from trainwright.compatibility.accelerate.machine import show
from trainwright.compatibility.accelerate.reading import read
from trainwright.compatibility.accelerate.translation import build_rendezvous_error, interpret
from trainwright.errors import RequestError

# Further examples beside the checkout, where there are some.
SHARED = sorted((Path(__file__).parents[4] / "shared" / "accelerate-configs").glob("*"))


def test_loose_ddp(tmp_path: Path) -> None:
    found = translation(tmp_path, files.LOOSE_DDP, "ddp.json")
    assert found.to_overrides() == [
        "train.mixed_precision=bf16",
        "parallel.strategy=ddp",
        "parallel.num_processes=4",
    ]
    assert (found.device, found.nodes, found.node_rank, found.rendezvous) == ("cuda", 1, 0, None)
    assert found.notes == () and found.problems == ()


def test_lower_case(tmp_path: Path) -> None:
    found = translation(tmp_path, files.LOWER_CASE)
    assert (found.strategy, found.device, found.processes) == ("ddp", "cuda", 2)
    assert found.problems == ()


def test_fsdp_version_1(tmp_path: Path) -> None:
    found = translation(tmp_path, files.FSDP_1)
    assert values(found) == {
        "train.mixed_precision": "bf16",
        "parallel.strategy": "fsdp",
        "parallel.reshard_after_forward": True,
        "parallel.wrap": ["Phi3DecoderLayer"],
        "parallel.offload_parameters": True,
        "parallel.num_processes": 4,
    }
    said = {key for note in found.notes for key in note.keys}
    assert said == {
        "fsdp_backward_prefetch",
        "fsdp_cpu_ram_efficient_loading",
        "fsdp_forward_prefetch",
        "fsdp_state_dict_type",
        "fsdp_sync_module_states",
        "fsdp_use_orig_params",
    }
    assert 'parallel.wrap=["Phi3DecoderLayer"]' in found.to_overrides()


def test_fsdp_version_2(tmp_path: Path) -> None:
    found = translation(tmp_path, files.FSDP_2)
    assert values(found) == {
        "train.mixed_precision": "no",
        "parallel.strategy": "fsdp",
        "parallel.reshard_after_forward": False,
        "parallel.wrap": ["LlamaDecoderLayer", "Embedding"],
        "train.activation_checkpointing": "full",
        "parallel.num_processes": 4,
    }
    assert found.device == "cpu" and found.problems == ()


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        (
            "fsdp_backward_prefetch: BACKWARD_PRE",
            "followed: the next block is gathered before the gradients of a block",
        ),
        ("fsdp_backward_prefetch: BACKWARD_POST", "not followed: FSDP2 always does BACKWARD_PRE, with which one more"),
        ("fsdp_backward_prefetch: 3", "not followed: FSDP2 always does BACKWARD_PRE"),  # as the wizard counts
        ("fsdp_forward_prefetch: false", "followed: a block is gathered when the CPU reaches it"),
        ("fsdp_forward_prefetch: true", "not followed: .* ahead of a GPU, and not one block before"),
        ("fsdp_state_dict_type: SHARDED_STATE_DICT", "followed: each process writes its shards"),
        ("fsdp_state_dict_type: FULL_STATE_DICT", "checkpoints are always sharded; final/ is one full model"),
        ("fsdp_state_dict_type: LOCAL_STATE_DICT", "as with SHARDED_STATE_DICT"),
        ("fsdp_min_num_params: 2000", "for SIZE_BASED_WRAP only"),
    ],
)
def test_what_becomes_of_a_setting_depends_on_its_value(tmp_path: Path, setting: str, said: str) -> None:
    found = translation(tmp_path, f"distributed_type: FSDP\nnum_processes: 2\nfsdp_config:\n  {setting}\n")
    (note,) = found.notes
    assert note.keys == (setting.partition(":")[0],) and re.match(said, note.reason)
    assert found.problems == ()


def test_wrapping_by_size_says_which_units_there_are_instead(tmp_path: Path) -> None:
    text = "distributed_type: FSDP\nnum_processes: 2\nfsdp_config:\n  fsdp_auto_wrap_policy: SIZE_BASED_WRAP\n"
    found = translation(tmp_path, text + "  fsdp_min_num_params: 100000000\n")
    assert {note.keys: note.reason for note in found.notes} == {
        ("fsdp_auto_wrap_policy",): "SIZE_BASED_WRAP is not followed: each of the model's blocks is a unit",
        (
            "fsdp_min_num_params",
        ): "a block is a unit with less and with more than 100,000,000 parameters; parallel.wrap names others",
    }
    wrong = translation(tmp_path, text + "  fsdp_backward_prefetch: BACKWARDS\n  fsdp_min_num_params: many\n")
    assert "expected BACKWARD_PRE or BACKWARD_POST or NO_PREFETCH" in problems(wrong)
    assert "fsdp_min_num_params: expected a whole number" in problems(wrong)


SHARDING = {
    "FULL_SHARD": ("fsdp", True, None),
    "SHARD_GRAD_OP": ("fsdp", False, None),
    "NO_SHARD": ("ddp", None, None),
    "HYBRID_SHARD": ("fsdp", True, 2),
    "HYBRID_SHARD_ZERO2": ("fsdp", False, 2),
}


@pytest.mark.parametrize("name", SHARDING)
def test_sharding_strategies_of_version_1(tmp_path: Path, name: str) -> None:
    text = "distributed_type: FSDP\nnum_processes: 8\nnum_machines: 2\nmain_process_ip: host\n"
    number = list(SHARDING).index(name) + 1
    written_ways = [("fsdp_sharding_strategy", value) for value in (name, name.lower(), number, f"'{number}'")]
    for key, value in [*written_ways, ("fsdp_reshard_after_forward", name)]:
        found = translation(tmp_path, f"{text}fsdp_config:\n  {key}: {value}\n")
        keys = ("parallel.strategy", "parallel.reshard_after_forward", "parallel.replicate_size")
        assert tuple(found.value(key) for key in keys) == SHARDING[name]
        assert found.problems == () and found.rendezvous == "host:29500"


def sized(kind: str, processes: int | None, **sizes: object) -> str:
    """A file with a parallelism_config, whose line is the last."""
    number = "" if processes is None else f"num_processes: {processes}\n"
    inside = ", ".join(f"parallelism_config_{name}: {value}" for name, value in sizes.items())
    return f"distributed_type: {kind}\n{number}parallelism_config: {{{inside}}}\n"


@pytest.mark.parametrize(
    ("text", "strategy", "replicas", "processes"),
    [
        (sized("FSDP", 4, dp_replicate_size=2, dp_shard_size=2), "fsdp", 2, 4),
        (sized("FSDP", 4, dp_shard_size=4, cp_size=1), "fsdp", 1, 4),
        (sized("FSDP", None, dp_replicate_size=2, dp_shard_size=3), "fsdp", 2, 6),
        (sized("FSDP", 4, tp_size=1, dp_replicate_size=1), "fsdp", None, 4),
        (sized("MULTI_GPU", 4, dp_replicate_size=4), "ddp", None, 4),
    ],
)
def test_sizes_of_parallelism(tmp_path: Path, text: str, strategy: str, replicas: int | None, processes: int) -> None:
    found = translation(tmp_path, text)
    assert problems(found) == ""
    assert (found.strategy, found.value("parallel.replicate_size"), found.processes) == (strategy, replicas, processes)
    assert found.value("parallel.num_processes") == processes


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            sized("FSDP", 4, dp_replicate_size=2),
            ":3: .*_replicate_size: 2: .* 2 x .* 1 needs 2 .*, but .*:2: num_processes: 4; set dp_shard_size: 2",
        ),
        (
            sized("FSDP", 4, dp_shard_size=8),
            "dp_shard_size: 8: .* 1 x .* 8 needs 8 processes, but .*:2: num_processes: 4",
        ),
        (sized("NO", None, dp_shard_size=2), "dp_shard_size: 2: .* needs 2 .* but .*:1: distributed_type: NO"),
        (
            sized("FSDP", 2, dp_replicate_size=2),
            "2 replicas on the same number of processes do not shard anything, which is ddp",
        ),
        (sized("FSDP", 4, dp_shard_size=2, tp_size=2), "tp_size: 2: tensor parallelism is not supported; set it to 1"),
        (sized("FSDP", 4, dp_shard_size=2, cp_size=2), "cp_size: 2: context parallelism is not supported"),
        (sized("FSDP", 4, sp_size=2), "sp_size: 2: sequence parallelism is not supported"),
        (sized("MULTI_GPU", 4, dp_shard_size=4), "dp_shard_size: 4: ddp has the full model in every process"),
        (sized("DEEPSPEED", 4, dp_shard_size=4), "dp_shard_size: 4: ZeRO shards over all processes"),
        (
            sized("FSDP", 4, dp_shard_sise=4),
            "dp_shard_sise: unknown key; did you mean parallelism_config_dp_shard_size",
        ),
        (sized("FSDP", None, dp_shard_size=3) + "num_machines: 2\nmain_process_ip: a\n", "cannot be divided over"),
    ],
)
def test_sizes_that_cannot_be_are_refused(tmp_path: Path, text: str, said: str) -> None:
    assert re.search(said, problems(translation(tmp_path, text))), problems(translation(tmp_path, text))


def test_keys_without_prefix_and_policies_without_counterpart(tmp_path: Path) -> None:
    text = "distributed_type: FSDP\nfsdp_config: {offload_params: true, auto_wrap_policy: size_based_wrap}\n"
    found = translation(tmp_path, text)
    assert found.value("parallel.offload_parameters") is True
    assert any("each of the model's blocks" in note.reason for note in found.notes)


def test_zero_inline(tmp_path: Path) -> None:
    assert values(translation(tmp_path, files.INLINE_ZERO)) == {
        "train.mixed_precision": "fp16",
        "parallel.strategy": "zero2",
        "parallel.offload_optimizer": True,
        "parallel.offload_parameters": False,
        "train.gradient_accumulation_steps": 4,
        "optimizer.max_grad_norm": 0.5,
        "parallel.num_processes": 2,
    }


@pytest.mark.parametrize(
    ("config", "scales", "others"),
    [
        ("{backend: AO}", "tensorwise", []),
        ("{backend: AO, pad_inner_dim: true, use_mxfp8_block_scaling: true}", "tensorwise", ["pad", "use_mxfp8"]),
        ("{fp8_backend: te, fp8_format: E4M3, use_mxfp8_block_scaling: true}", "mxfp8", []),
        ("{fp8_backend: te, fp8_format: HYBRID, use_mxfp8_block_scaling: true}", "mxfp8", ["fp8_format"]),
    ],
)
def test_fp8_is_what_its_library_computes(tmp_path: Path, config: str, scales: str, others: list[str]) -> None:
    found = translation(tmp_path, f"distributed_type: NO\nmixed_precision: fp8\nfp8_config: {config}\n")
    precision = {"train.mixed_precision": "bf16", "train.float8": scales}
    assert found.problems == () and values(found).items() >= precision.items()
    unsupported = [key for note in found.notes if "not supported" in note.reason for key in note.keys]
    assert len(unsupported) == len(others)
    assert all(any(f" {other}" in key for key in unsupported) for other in others)


@pytest.mark.parametrize(("stage", "strategy"), [(0, "ddp"), (1, "zero1"), (2, "zero2"), (3, "zero3"), (None, "zero2")])
def test_zero_stages(tmp_path: Path, stage: int | None, strategy: str) -> None:
    part = "" if stage is None else f"zero_stage: {stage}, "
    found = translation(tmp_path, f"distributed_type: deepspeed\ndeepspeed_config: {{{part}gradient_clipping: auto}}\n")
    assert found.strategy == strategy and found.problems == ()
    assert found.value("optimizer.max_grad_norm") is None


def test_zero_by_file_beside_it_on_two_machines(tmp_path: Path) -> None:
    found = translation(tmp_path, files.TWO_NODES)
    assert values(found) == {
        "parallel.deepspeed_config": str(tmp_path / "zero3.json"),
        "parallel.strategy": "zero3",
        "parallel.offload_optimizer": True,
        "parallel.offload_parameters": True,
        "parallel.num_processes": 8,
    }
    assert (found.nodes, found.node_rank, found.rendezvous) == (2, 1, "192.168.1.1:18765")
    assert found.local_processes == 4


def test_numbers_of_a_deepspeed_file_are_the_recipes(tmp_path: Path) -> None:
    path = written(tmp_path, files.TWO_NODES)
    own = {
        "zero_optimization": {"stage": 2},
        "fp16": {"enabled": True},
        "train_batch_size": 32,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.0,
    }
    (tmp_path / "zero3.json").write_text(json.dumps(own))
    found = values(interpret(read(path)))
    assert found["train.global_batch_size"] == 32 and found["train.micro_batch_size"] == 4
    assert found["train.gradient_accumulation_steps"] == 2 and found["train.mixed_precision"] == "fp16"
    assert found["optimizer.max_grad_norm"] is None and found["parallel.strategy"] == "zero2"


def test_deepspeed_file_in_place_of_accelerates(tmp_path: Path) -> None:
    found = translation(tmp_path, json.dumps(files.ZERO_3), "zero.json")
    assert found.strategy == "zero3" and found.device == "any" and found.problems == ()
    assert found.value("parallel.deepspeed_config") == str(tmp_path / "zero.json")


@pytest.mark.parametrize(
    ("text", "strategy", "processes", "device"),
    [
        (files.TWO_CPU, "ddp", 2, "cpu"),
        ("distributed_type: NO\n", "single", 1, "any"),
        ("distributed_type: 'NO'\nuse_cpu: yes\nnum_processes: 1\n", "single", 1, "cpu"),
        ("distributed_type: MULTI_GPU\nnum_processes: 1\n", "single", 1, "cuda"),
        ("distributed_type: MULTI_GPU\n", "ddp", None, "cuda"),
        ("distributed_type: MULTI_GPU\nnum_processes: -1\n", "ddp", None, "cuda"),
        ("distributed_type: MULTI_CPU\nnum_processes: 3\n", "ddp", 3, "cpu"),
    ],
)
def test_plain_kinds(tmp_path: Path, text: str, strategy: str, processes: int | None, device: str) -> None:
    found = translation(tmp_path, text)
    assert (found.strategy, found.processes, found.device) == (strategy, processes, device)
    assert found.problems == ()


def test_compile_devices_and_old_keys(tmp_path: Path) -> None:
    text = "distributed_type: MULTI_GPU\nnum_processes: 2\ngpu_ids: 1,3\ndynamo_config: {dynamo_backend: INDUCTOR}\n"
    found = translation(tmp_path, text + "fp16: true\n")
    assert found.value("train.compile") is True and found.value("train.mixed_precision") == "fp16"
    assert found.build_device_environment() == {"CUDA_VISIBLE_DEVICES": "1,3"}
    assert translation(tmp_path, files.TWO_CPU).build_device_environment() == {"CUDA_VISIBLE_DEVICES": ""}
    assert "train.compile" not in values(translation(tmp_path, "distributed_type: NO\ndynamo_backend: 'NO'\n"))
    assert "eager" in problems(translation(tmp_path, "distributed_type: NO\ndynamo_backend: eager\n"))


def test_switched_on_extras_have_a_line_each(tmp_path: Path) -> None:
    text = files.LOWER_CASE + (
        "downcast_bf16: 'yes'\ndebug: true\nenable_cpu_affinity: true\ntpu_use_sudo: true\nmain_process_port: 1234\n"
        "main_training_function: train\nfsdp_config: {fsdp_offload_params: true}\nmpirun_config: {mpirun_ccl: '1'}\n"
        "ipex_config: {ipex: true}\nmegatron_lm_config: {megatron_lm_tp_degree: 2}\n"
    )
    found = translation(tmp_path, text)
    said = {key for note in found.notes for key in note.keys}
    assert said >= {"downcast_bf16", "debug", "enable_cpu_affinity", "tpu_use_sudo", "main_process_port"}
    assert said >= {"main_training_function", "fsdp_config", "mpirun_config", "ipex_config", "megatron_lm_config"}
    assert found.problems == () and "parallel.offload_parameters" not in values(found)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("num_processes: 2\n", r"distributed_type is missing.*MULTI_GPU"),
        ("distributed_type: MULTI_GPUS\n", r":1: distributed_type: expected .*; did you mean MULTI_GPU\?"),
        ("distributed_type: MEGATRON_LM\n", "not supported: Megatron-LM; choose from NO"),
        ("distributed_type: XLA\n", "not supported: TPUs"),
        ("compute_environment: AMAZON_SAGEMAKER\ndistributed_type: NO\n", ":1: .*only LOCAL_MACHINE"),
        ("distributed_type: NO\nnum_processes: 4\n", ":1: .* NO is one process, but .*:2: num_processes: 4"),
        ("distributed_type: MULTI_GPU\nuse_cpu: true\n", ":1: .* contradicts .*:2: use_cpu: true"),
        ("distributed_type: MULTI_GPU\nnum_processes: 3\nnum_machines: 2\n", ":2: num_processes: 3 cannot be divided"),
        ("distributed_type: MULTI_GPU\nmachine_rank: 1\n", "machine_rank: 1: machines are counted from 0"),
        ("distributed_type: NO\nmixed_precision: fp8\n", "fp8 is supported with backend AO in fp8_config"),
        ("distributed_type: NO\nmixed_precision: fp8\nfp8_config: {backend: TE}\n", "the nearest is bf16"),
        ("distributed_type: NO\nmixed_precision: bf61\n", "did you mean BF16"),
        ("distributed_type: NO\nnum_procesess: 1\n", ":2: num_procesess: unknown key; did you mean num_processes?"),
        ("distributed_type: FSDP\nfsdp_version: 2\n", "fsdp_version: unknown key; it belongs under fsdp_config"),
        ("distributed_type: FSDP\nfsdp_config: {fsdp_ofload_params: true}\n", "did you mean fsdp_offload_params"),
        ("distributed_type: FSDP\nfsdp_config: {fsdp_offload_params: perhaps}\n", "expected true or false"),
        ("distributed_type: FSDP\nfsdp_config: [1]\n", "expected keys and values"),
        ("distributed_type: FSDP\nfsdp_config: {fsdp_version: 3}\n", "expected 1 or 2"),
        ("distributed_type: FSDP\nfsdp_config: {fsdp_ignored_modules: head}\n", "all parameters are sharded"),
        (
            "distributed_type: FSDP\nfsdp_config:\n  fsdp_sharding_strategy: FULL_SHARD\n"
            "  fsdp_reshard_after_forward: false\n",
            ":3: .* contradicts .*:4: .*parallel.reshard_after_forward",
        ),
        ("distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 4}\n", "expected 0, 1, 2 or 3"),
        ("distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 3, offload_param_device: nvme}\n", "to cpu"),
        (
            "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 2, offload_param_device: cpu}\n",
            "only ZeRO stage 3 offloads",
        ),
        ("distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: no.json}\n", "no such file nor"),
        (
            "distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: zero3.json, zero_stage: 2}\n",
            "stage: 3 contradicts .*zero_stage: 2",
        ),
        ("distributed_type: NO\ndistributed_type: FSDP\n", "given twice"),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused_with_its_place(tmp_path: Path, text: str, said: str) -> None:
    found = translation(tmp_path, text)
    with pytest.raises(RequestError) as refused:
        found.to_overrides()
    assert re.search(said, str(refused.value)), refused.value


def test_accumulation_given_twice_has_to_agree(tmp_path: Path) -> None:
    found = translation(tmp_path, files.INLINE_ZERO + "gradient_accumulation_steps: 2\n")
    assert "train.gradient_accumulation_steps" in problems(found)


def test_machines_of_the_command_line_win(tmp_path: Path) -> None:
    text = files.TWO_NODES.replace('main_process_ip: "192.168.1.1"\n', "")
    found = translation(tmp_path, text)
    error = build_rendezvous_error(found)
    assert error is not None and "main_process_ip is missing" in str(error)
    joined = found.set_machines(node_rank=0, rendezvous="other:1")
    assert build_rendezvous_error(joined) is None and (joined.node_rank, joined.nodes) == (0, 2)


@pytest.mark.parametrize("width", [80, 100])
@pytest.mark.parametrize(
    "text", [files.LOOSE_DDP, files.FSDP_1, files.FSDP_2, files.TWO_NODES, files.INLINE_ZERO, files.TWO_CPU]
)
def test_shown_on_one_screen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, width: int) -> None:
    written(tmp_path, text, "file.yaml")
    monkeypatch.chdir(tmp_path)
    source = read(Path("file.yaml"))
    screen = show(source, interpret(source), files.CPU, width)
    assert len(screen.splitlines()) <= 26
    assert max(map(len, screen.splitlines())) <= width
    assert "processes" in screen and "strategy" in screen and "precision" in screen


@pytest.mark.skipif(not SHARED, reason="the examples are not here")
@pytest.mark.parametrize("path", SHARED, ids=lambda path: path.name)
def test_examples_are_all_understood(path: Path) -> None:
    found = interpret(read(path))
    assert found.problems == () and found.strategy is not None
    found.to_overrides()
