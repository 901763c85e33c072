"""`trainwright setup` as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.commands import MACHINE, PATIENCE, environment, trainwright
from trainwright.utils.text import quote_word

ZERO = "distributed_type: DEEPSPEED\nuse_cpu: true\nnum_processes: 2\ndeepspeed_config: {zero_stage: 2}\n"
WANTS_GPUS = "distributed_type: MULTI_GPU\nnum_processes: 64\nmixed_precision: bf16\n"


ANSWERS = (
    "here\n2\n1\n10.0.0.1\nport\n\n3\nfspd\nfsdp\nno\nLlamaDecoderLayer\nyes\nyes\nbf61\nBF16\n"  # of an FSDP file
)


def setup(cwd: Path, *arguments: str, answers: str = "", **more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "trainwright", "setup", *arguments]
    variables = environment(HF_HOME=str(cwd / "hf"), CUDA_VISIBLE_DEVICES="", **more)
    return subprocess.run(
        command, cwd=cwd, env=variables, input=answers, capture_output=True, text=True, timeout=PATIENCE
    )


@pytest.mark.usefixtures("two_cores")
def test_yes_writes_to_accelerates_place_and_says_how_to_use_it(tmp_path: Path) -> None:
    result = setup(tmp_path, "--yes")
    path = tmp_path / "hf" / "accelerate" / "default_config.yaml"
    assert result.returncode == 0, result.stderr
    assert yaml.safe_load(path.read_text())["use_cpu"] is True
    assert str(path) in result.stdout and "accelerate launch SCRIPT" in result.stdout
    assert f"train RECIPE --accelerate-config {quote_word(path)}" in result.stdout
    shown = setup(tmp_path, "--show")
    assert shown.returncode == 0 and "runs: " in shown.stdout


def test_yes_keeps_the_file_that_is_there(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(WANTS_GPUS)
    result = setup(tmp_path, "--yes", "--config-file", "mine.yaml")
    assert result.returncode == 0, result.stderr
    assert "mine.yaml.bak" in result.stdout
    assert (tmp_path / "mine.yaml.bak").read_text() == WANTS_GPUS


@pytest.mark.usefixtures("two_cores")
def test_questions_are_explained_and_asked_again_until_answered(tmp_path: Path) -> None:
    result = setup(tmp_path, "--config-file", "new.yaml", answers=ANSWERS)
    assert result.returncode == 0, result.stderr
    assert all(f"not '{wrong}'" in result.stdout for wrong in ("port", "fspd", "bf61"))
    values = yaml.safe_load((tmp_path / "new.yaml").read_text())
    assert (values["num_machines"], values["machine_rank"], values["num_processes"]) == (2, 1, 6)
    assert (values["main_process_ip"], values["main_process_port"]) == ("10.0.0.1", 29500)
    assert (values["mixed_precision"], values["distributed_type"]) == ("bf16", "FSDP")
    assert values["dynamo_config"] == {"dynamo_backend": "INDUCTOR"}
    fsdp = values["fsdp_config"]
    assert fsdp["fsdp_reshard_after_forward"] is False and fsdp["fsdp_activation_checkpointing"] is True
    assert fsdp["fsdp_transformer_layer_cls_to_wrap"] == "LlamaDecoderLayer"
    assert "trainwright launch" not in result.stdout, "a script would run as DDP"


@pytest.mark.usefixtures("two_cores")
def test_options_of_deepspeed_are_asked(tmp_path: Path) -> None:
    result = setup(tmp_path, "--config-file", "new.yaml", answers="\n\n2\nzero2\nno.json\nnone\n4\n-1\n0.5\n\n\n")
    assert result.returncode == 0, result.stderr
    assert "no.json: no such file" in result.stdout and "not '-1'" in result.stdout
    part = yaml.safe_load((tmp_path / "new.yaml").read_text())["deepspeed_config"]
    assert (part["zero_stage"], part["gradient_accumulation_steps"], part["gradient_clipping"]) == (2, 4, 0.5)


def test_gpus_and_their_numbers_are_asked(tmp_path: Path) -> None:
    machine = json.loads(MACHINE.read_text())
    gpu = {"name": "NVIDIA A100", "memory_bytes": 2**36, "capability": [8, 0]}
    machine["machine"] |= {"gpus": [gpu] * 4}
    (tmp_path / "machine.json").write_text(json.dumps(machine))
    result = setup(
        tmp_path,
        "--config-file",
        "new.yaml",
        answers="\n\n0,4\n0, 2\n\n\n\n\n\n",
        TRAINWRIGHT_MACHINE=str(tmp_path / "machine.json"),
    )
    assert result.returncode == 0, result.stderr
    assert "not '0,4'" in result.stdout
    values = yaml.safe_load((tmp_path / "new.yaml").read_text())
    assert (values["gpu_ids"], values["num_processes"], values["distributed_type"]) == ("0,2", 2, "MULTI_GPU")


@pytest.mark.parametrize("place", ["slurm", "kubernetes", "skypilot", "ray", "cloud", "sagemaker"])
def test_a_cluster_or_a_cloud_is_answered_with_its_command(tmp_path: Path, place: str) -> None:
    result = setup(tmp_path, "--config-file", "new.yaml", answers=f"{place}\n")
    assert result.returncode == 0 and "trainwright submit RECIPE --to " in result.stdout
    assert not (tmp_path / "new.yaml").exists()


def with_old_deepspeed(directory: Path) -> str:
    """A PYTHONPATH on which a version of DeepSpeed is installed that is not known to work."""
    metadata = directory / "site" / "deepspeed-0.17.2.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: deepspeed\nVersion: 0.17.2\n")
    return os.pathsep.join([str(directory / "site"), environment()["PYTHONPATH"]])


@pytest.mark.usefixtures("two_cores")
def test_strategies_whose_library_is_not_there_are_not_taken(tmp_path: Path) -> None:
    path = with_old_deepspeed(tmp_path)
    result = setup(tmp_path, "--config-file", "new.yaml", answers="\n\n2\nzero2\nddp\n\n\n", PYTHONPATH=path)
    assert result.returncode == 0, result.stderr
    assert "DeepSpeed 0.17.2 is not supported; pip install" in result.stdout
    assert yaml.safe_load((tmp_path / "new.yaml").read_text())["distributed_type"] == "MULTI_CPU"
    (tmp_path / "zero.yaml").write_text(ZERO)
    shown = setup(tmp_path, "--show", "--config-file", "zero.yaml", PYTHONPATH=path)
    assert shown.returncode == 0 and "cannot run: " in shown.stdout and "pip install" in shown.stdout
    assert "RECIPE" not in shown.stdout and "SCRIPT" not in shown.stdout


def test_show_asks_nothing_that_could_be_answered_with_yes(tmp_path: Path) -> None:
    result = setup(tmp_path, "--show", "--yes")
    assert result.returncode == 2 and "--yes" in result.stderr and "--show" in result.stderr
    assert not (tmp_path / "hf").exists()


@pytest.mark.usefixtures("two_cores")
def test_existing_file_is_replaced_only_when_that_is_answered(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(WANTS_GPUS)
    result = setup(tmp_path, "--config-file", "mine.yaml", answers="\n")
    assert result.returncode == 0 and "nothing written" in result.stdout
    assert (tmp_path / "mine.yaml").read_text() == WANTS_GPUS
    result = setup(tmp_path, "--config-file", "mine.yaml", answers="yes\n\n\n2\n\n\n\n")
    assert result.returncode == 0, result.stderr
    assert yaml.safe_load((tmp_path / "mine.yaml").read_text())["use_cpu"] is True


def test_no_answers_end_with_2_and_write_nothing(tmp_path: Path) -> None:
    result = setup(tmp_path, "--config-file", "new.yaml")
    assert result.returncode == 2 and "--yes" in result.stderr and "Traceback" not in result.stderr
    assert not (tmp_path / "new.yaml").exists()


@pytest.mark.usefixtures("two_cores")
def test_show_says_what_cannot_run_here_and_ends_with_0(tmp_path: Path) -> None:
    (tmp_path / "gpus.yaml").write_text(WANTS_GPUS)
    result = setup(tmp_path, "--show", "--config-file", "gpus.yaml")
    assert result.returncode == 0, result.stderr
    assert "cannot run: MULTI_GPU requires 64 GPUs" in result.stdout and "possible here" in result.stdout
    (tmp_path / "wrong.yaml").write_text("distributed_type: MULTI_GPU\nnum_procesess: 2\n")
    result = setup(tmp_path, "--show", "--config-file", "wrong.yaml")
    assert result.returncode == 0 and "did you mean num_processes" in " ".join(result.stdout.split())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--show",), "write one with `trainwright setup`"),
        (("--show", "--config-file", "no.yaml"), "no.yaml: no such file"),
    ],
)
def test_show_without_a_file_ends_with_2(tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    result = setup(tmp_path, *arguments)
    assert result.returncode == 2 and said in result.stderr


def test_setup_imports_nothing_heavy(tmp_path: Path) -> None:
    code = (
        "import sys; from trainwright.compatibility.commands import setup; setup(None, False, True);"
        "print([name for name in ('torch', 'transformers', 'datasets', 'accelerate') if name in sys.modules])"
    )
    variables = environment(HF_HOME=str(tmp_path))
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=variables, capture_output=True, text=True, check=True
    )
    assert result.stdout.splitlines()[-1] == "[]"


def test_accelerate_launch_takes_the_file_unchanged(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    (tmp_path / "script.py").write_text("import os; print('precision', os.environ['ACCELERATE_MIXED_PRECISION'])\n")
    assert trainwright("setup", "--yes", "--config-file", "new.yaml", cwd=tmp_path).returncode == 0
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", "new.yaml", "script.py"]
    result = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=PATIENCE)
    assert result.returncode == 0 and "precision" in result.stdout, result.stderr
