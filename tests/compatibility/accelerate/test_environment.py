"""The variables between `accelerate launch` and its workers, both ways."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import pytest

from tests.compatibility.accelerate import files
from tests.compatibility.accelerate.files import values, written
from trainwright.compatibility.accelerate.launcher import build_worker_environment, from_environment
from trainwright.compatibility.accelerate.reading import read
from trainwright.compatibility.accelerate.translation import interpret
from trainwright.errors import RequestError

# What `accelerate launch` 1.15 gave a worker of a version-1 FSDP file for 4 GPUs.
FSDP_WORKER = {
    "ACCELERATE_DYNAMO_BACKEND": "NO",
    "ACCELERATE_DYNAMO_MODE": "default",
    "ACCELERATE_DYNAMO_USE_DYNAMIC": "False",
    "ACCELERATE_DYNAMO_USE_FULLGRAPH": "False",
    "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "False",
    "ACCELERATE_MIXED_PRECISION": "bf16",
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_ACTIVATION_CHECKPOINTING": "false",
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "false",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_BACKWARD_PREFETCH": "BACKWARD_PRE",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
    "FSDP_FORWARD_PREFETCH": "true",
    "FSDP_MIN_NUM_PARAMS": "100000000",
    "FSDP_OFFLOAD_PARAMS": "true",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_SHARDING_STRATEGY": "FULL_SHARD",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
    "FSDP_SYNC_MODULE_STATES": "true",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "Phi3DecoderLayer",
    "FSDP_USE_ORIG_PARAMS": "true",
    "FSDP_VERSION": "1",
}
TORCHRUN = {
    "GROUP_RANK": "0",
    "GROUP_WORLD_SIZE": "1",
    "LOCAL_RANK": "3",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "RANK": "3",
    "WORLD_SIZE": "4",
}
# … and the one worker of a MULTI_CPU file with two processes.
CPU_WORKER = {
    "ACCELERATE_MIXED_PRECISION": "no",
    "ACCELERATE_USE_CPU": "True",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


def written_for(directory: Path, text: str) -> dict[str, str]:
    source = read(written(directory, text))
    found = interpret(source)
    return build_worker_environment(source, found, on_cpu=found.device == "cpu")


def test_fsdp_file_becomes_what_accelerate_makes_of_it(tmp_path: Path) -> None:
    assert written_for(tmp_path, files.FSDP_1) == {
        key: value.lower() if value == "False" else value for key, value in FSDP_WORKER.items()
    } | {key: value for key, value in FSDP_WORKER.items() if key.startswith("ACCELERATE_DYNAMO")}


def test_workers_variables_mean_what_the_file_means() -> None:
    found = from_environment(FSDP_WORKER | TORCHRUN)
    assert found is not None and found.problems == () and found.notes == ()
    assert values(found) == {
        "train.mixed_precision": "bf16",
        "parallel.strategy": "fsdp",
        "parallel.wrap": ["Phi3DecoderLayer"],
        "parallel.offload_parameters": True,
        "parallel.num_processes": 4,
    }
    assert found.device == "any" and not found.one_of_several


@pytest.mark.parametrize(
    "text",
    [
        files.LOOSE_DDP,
        files.FSDP_1,
        files.FSDP_2,
        files.INLINE_ZERO,
        files.TWO_NODES,
        files.TWO_CPU,
        "distributed_type: FSDP\nnum_processes: 4\nfsdp_config: {fsdp_reshard_after_forward: SHARD_GRAD_OP}\n",
        "distributed_type: FSDP\nnum_processes: 4\nnum_machines: 2\nmain_process_ip: host\n"
        "fsdp_config: {fsdp_sharding_strategy: hybrid_shard}\n",
        "distributed_type: MULTI_GPU\nnum_processes: 2\ndynamo_config: {dynamo_backend: inductor}\n",
        files.FSDP_2 + "parallelism_config: {parallelism_config_dp_replicate_size: 2, "
        "parallelism_config_dp_shard_size: 2}\n",
    ],
)
def test_there_and_back(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path, text)
    before = interpret(read(Path("accelerate.yaml")))
    sizes = {
        "WORLD_SIZE": str(before.processes),
        "GROUP_WORLD_SIZE": str(before.nodes),
        "GROUP_RANK": str(before.node_rank),
        "MASTER_ADDR": "host",
    }
    after = from_environment(written_for(Path(), text) | sizes)
    assert after is not None and after.problems == ()
    # Not in the environment, as Accelerate's default is the same; and the default here is the same as well.
    implied = {
        "parallel.reshard_after_forward": True,
        "parallel.offload_parameters": False,
        "train.mixed_precision": "no",
    }
    for key, value in values(before).items():
        assert values(after).get(key, implied.get(key)) == value, key
    assert values(after).keys() <= values(before).keys()
    assert after.nodes == before.nodes


def test_other_launchers_are_not_accelerates() -> None:
    assert from_environment(TORCHRUN) is None


def test_one_process_in_place_of_two_is_noticed() -> None:
    found = from_environment(CPU_WORKER)
    assert found is not None and found.one_of_several and found.processes is None and found.device == "cpu"
    with pytest.raises(RequestError, match="starts only one"):
        found.to_overrides()
    alone = {name: value for name, value in CPU_WORKER.items() if not name.startswith("MASTER")}
    found = from_environment(alone)
    assert found is not None and found.strategy == "single" and not found.one_of_several
    found = from_environment(CPU_WORKER | {"OMPI_COMM_WORLD_SIZE": "2"})
    assert found is not None and not found.one_of_several


def test_list_of_classes_as_accelerate_passes_it_on() -> None:
    found = from_environment(FSDP_WORKER | TORCHRUN | {"FSDP_TRANSFORMER_CLS_TO_WRAP": "['Block', 'Head']"})
    assert found is not None and found.value("parallel.wrap") == ["Block", "Head"]


def test_default_precision_of_accelerate_is_nobodys_wish() -> None:
    found = from_environment({"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_USE_CPU": "false"})
    assert found is not None and "train.mixed_precision" not in values(found)


@pytest.mark.parametrize("text", [files.FSDP_1, files.FSDP_2, files.LOOSE_DDP.replace("True", "true")])
def test_same_variables_as_accelerates_own_launcher(tmp_path: Path, text: str) -> None:
    pytest.importorskip("accelerate", minversion="1.15")
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    path = written(tmp_path, text.replace("mixed_precision: no\n", "mixed_precision: 'no'\n"))
    more = "" if "num_machines" in text else "num_machines: 1\n"
    # A list would be passed on as the text that Python prints for it.
    path.write_text(path.read_text().replace("[LlamaDecoderLayer, Embedding]", "LlamaDecoderLayer") + more)
    arguments: argparse.Namespace
    arguments = _validate_launch_command(
        launch_command_parser().parse_args(["--config_file", str(path), "--main_process_port", "0", "x.py"])
    )[0]
    theirs = prepare_multi_gpu_env(arguments)
    ours = build_worker_environment(read(path), interpret(read(path)), on_cpu=False)
    names = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")
    known = {name: value for name, value in theirs.items() if name.startswith(names) and name not in os.environ}
    assert {k: v.lower() for k, v in ours.items()} == {k: v.lower() for k, v in known.items()}


@pytest.mark.parametrize(
    ("variables", "strategy"),
    [
        ({"ACCELERATE_USE_DEEPSPEED": "1"}, "zero2"),
        ({"ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}, "zero3"),
        ({"ACCELERATE_USE_FSDP": "yes"}, "fsdp"),
    ],
)
def test_variables_that_a_user_sets_without_a_precision_count(variables: dict[str, str], strategy: str) -> None:
    found = from_environment(variables | TORCHRUN)
    assert found is not None and found.problems == ()
    assert values(found)["parallel.strategy"] == strategy


def test_deepspeed_that_is_turned_off_is_not_used() -> None:
    off = {"ACCELERATE_USE_DEEPSPEED": "false", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}
    assert from_environment(off | TORCHRUN) is None
