"""What a simulated run finds: memory beside the plan, collectives beside real ones, waits, and mixed devices."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import trainwright as package
from tests.planning.simulation.cases import RECIPE, Case, Found, simulate_all
from tests.support.commands import python, trainwright
from tests.support.runs import ON_ROWS, TINY, Runs
from trainwright.errors import RequestError
from trainwright.machine.detect import detect
from trainwright.planning.simulation.start import read_simulated_machine
from trainwright.recipe.loading import load_recipe
from trainwright.run import run_directory
from trainwright.run.resolve import resolve

# The same run on one node of GPUs and on this machine's processor.
SAME = (
    *(ON_ROWS, "model.dropout=null", "data.pack_length=128", "data.max_length=128", "train.max_steps=2"),
    *("train.micro_batch_size=1", "train.global_batch_size=24", "train.mixed_precision=bf16", "train.compile=false"),
    *("train.activation_checkpointing=none", "logging.observers.tensorboard=false"),
)
REAL = {
    "ddp on 2": (2, ("parallel.strategy=ddp",)),
    "fsdp on 2": (2, ("parallel.strategy=fsdp", "parallel.reshard_after_forward=false")),
    "resharded on 3": (3, ("parallel.strategy=fsdp", "parallel.reshard_after_forward=true")),
    "hybrid on 4": (
        4,
        ("parallel.strategy=fsdp", "parallel.replicate_size=2", "parallel.reshard_after_forward=true"),
    ),
    "muon by ddp on 2": (2, ("parallel.strategy=ddp", "optimizer.name=muon")),
    "soap by ddp on 2": (2, ("parallel.strategy=ddp", "optimizer.name=soap")),
    "muon on 3": (3, ("parallel.strategy=fsdp", "parallel.reshard_after_forward=true", "optimizer.name=muon")),
    "muon by a hybrid on 4": (
        4,
        (
            *("parallel.strategy=fsdp", "parallel.replicate_size=2", "parallel.reshard_after_forward=true"),
            "optimizer.name=muon",
        ),
    ),
}
# A GPU exchanges matrices in bf16, a CPU in fp32.
TWICE = ("all_to_all", "broadcast")
SMALL = (
    *("model.config.num_hidden_layers=2", "model.config.hidden_size=128", "model.config.intermediate_size=256"),
    *("train.global_batch_size=8", "train.micro_batch_size=1", "parallel.strategy=single"),
)
POLICIES = "[tests.planning.simulation.policies:Waits, tests.planning.simulation.policies:MixesDevices]"
# A schedule and a growing batch that are longer than the steps of the simulation, and answers, which it leaves out.
LONG = (
    *("optimizer.warmup_steps=100", "train.max_steps=1000"),
    *("train.initial_batch_size=8", "train.batch_warmup_steps=50"),
    *("evaluate.prompts=[Hello]", "evaluate.max_new_tokens=48"),
)
MEMORY = Case(
    "64x8xH100", ("parallel.strategy=fsdp", "parallel.num_processes=512", "train.global_batch_size=1024", *LONG)
)


MISTAKES = Case("1xA100-80GB", (*SMALL, f"train.step_policies={POLICIES}"))
NEEDS_TF32 = "train.step_policies=[tests.planning.simulation.policies:NeedsTf32]"
IN_FP32 = Case("1xA100-80GB", (*SMALL, NEEDS_TF32, "train.mixed_precision=no"))
IN_TF32 = Case("1xA100-80GB", (*IN_FP32.overrides, "train.tf32=true"))
# Matrices that take more than the rounding of sizes, in two replicas.
MUON = Case(
    "2x8xH100",
    (
        *("parallel.strategy=fsdp", "parallel.num_processes=16", "parallel.replicate_size=2", "optimizer.name=muon"),
        *("train.global_batch_size=32", "train.micro_batch_size=1", "parallel.reshard_after_forward=true"),
    ),
)
OFFLOADED = Case(
    "8xH100",
    (
        *("parallel.strategy=fsdp", "parallel.num_processes=8", "train.activation_offload=true"),
        *("train.activation_checkpointing=none", "train.global_batch_size=256", "train.micro_batch_size=1"),
    ),
)
RECIPES = Path(__file__).parents[3] / "recipes"
FRESH = (
    *("model.name=null", "model.tokenizer=bytes"),
    "model.config={model_type: llama, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2, "
    "num_attention_heads: 4}",
)
OTHER_TASKS = {
    "npo": Case("1xH100", FRESH, str(RECIPES / "unlearn" / "tiny.yaml")),
    "kl": Case("1xH100", (*FRESH, "unlearn.retain_loss=kl"), str(RECIPES / "unlearn" / "tiny.yaml")),
    "dpo": Case("8xH100", ("parallel.num_processes=8",), str(RECIPES / "dpo" / "tiny.yaml")),
    "kto": Case("1xH100", ("dpo.loss=kto",), str(RECIPES / "dpo" / "tiny.yaml")),
}


def as_real(name: str) -> Case:
    ranks, how = REAL[name]
    return Case("8xH100", (*SAME, *how, f"parallel.num_processes={ranks}"), str(TINY))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Found]:
    """The simulation of the fast tests."""
    return simulated({"mistakes": MISTAKES}, tmp_path_factory)


@pytest.fixture(scope="module")
def more(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Found]:
    """Those of the slow tests, in forks of one process."""
    cases = {"memory": MEMORY, "muon": MUON, "offloaded": OFFLOADED, "fp32": IN_FP32, "tf32": IN_TF32, **OTHER_TASKS}
    return simulated(cases, tmp_path_factory)


def simulated(cases: dict[str, Case], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Found]:
    done = simulate_all(list(cases.values()), tmp_path_factory.mktemp("simulated"))
    return dict(zip(cases, done, strict=True))


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Found]:
    """The simulations of what is also run."""
    return simulated({name: as_real(name) for name in REAL}, tmp_path_factory)


@pytest.mark.slow
def test_a_run_is_simulated_from_its_first_step_to_its_export(more: dict[str, Found]) -> None:
    report = more["memory"].report
    assert more["memory"].error == "" and report["error"] is None
    assert report["world"] == 512 and report["steps"] == 2
    assert set(report["memory"]) == {
        *("load", "forward", "backward", "optimizer", "evaluation", "checkpoint", "export"),
    }


@pytest.mark.slow
def test_the_peak_is_the_plans(more: dict[str, Found]) -> None:
    assert more["memory"].planned == pytest.approx(more["memory"].peak, rel=0.05)


@pytest.mark.slow
def test_updates_of_matrices_take_the_memory_of_the_plan(more: dict[str, Found]) -> None:
    muon = more["muon"]
    assert muon.error == "" and muon.report["error"] is None
    assert muon.report["collectives"].keys() >= set(TWICE)
    phase = {name: muon.report[name]["optimizer"] for name in ("memory", "planned_memory")}
    assert phase["planned_memory"] == pytest.approx(phase["memory"], rel=0.05)


@pytest.mark.slow
def test_offloaded_activations_come_back_one_block_ahead_without_a_wait(more: dict[str, Found]) -> None:
    report = more["offloaded"].report
    assert more["offloaded"].error == "" and report["error"] is None
    assert report["host_waits"] == 1
    for phase in ("forward", "backward"):
        assert report["planned_memory"][phase] == pytest.approx(report["memory"][phase], rel=0.05), phase


def recorded(runs: Runs, name: str) -> dict[str, list[int]]:
    """The collectives of the last step of a real run over gloo."""
    ranks, how = REAL[name]
    overrides = [*SAME, *how, f"parallel.num_processes={ranks}", "parallel.device=cpu"]
    resolved = resolve(load_recipe(TINY, overrides), detect())
    run = runs.new_directory("recorded")
    run.mkdir()
    text = run_directory.format_recipe(resolved.recipe)
    run_directory.record(run, text, "tiny", resolved.reasons, resolved.plan.document, resolved.chosen)
    runs.function("tests.planning.simulation.entries:record", str(run), processes=ranks)
    counts: dict[str, list[int]] = json.loads((run / "collectives-0.json").read_text())
    return counts


def check_real(one: Found, real: dict[str, list[int]]) -> None:
    """The same by kind, number and bytes; and the host waits once, for all numbers of the step.

    A GPU exchanges more of Muon's matrices at a time than a CPU does (parallel/matrix_exchange.py).
    """
    assert one.error == "" and one.report["error"] is None
    expected = {kind: [number, size // 2 if kind in TWICE else size] for kind, (number, size) in real.items()}
    if "optimizer.name=muon" in one.case.overrides:
        for kind in expected.keys() & {"broadcast", "all_to_all"}:
            assert one.report["collectives"][kind][0] < expected[kind][0]
            expected[kind][0] = one.report["collectives"][kind][0]
    assert one.report["collectives"] == expected
    assert [wait["number"] for wait in one.report["waits"]] == [1], one.report["waits"]


@pytest.mark.slow
@pytest.mark.parametrize("name", REAL)
def test_collectives_are_those_of_a_real_run(runs: Runs, sharded: dict[str, Found], name: str) -> None:
    check_real(sharded[name], recorded(runs, name))


@pytest.mark.slow
def test_mixed_devices_are_an_error_with_its_line(found: dict[str, Found]) -> None:
    error = found["mistakes"].report["error"]
    assert "cuda:0" in error and "cpu" in error
    assert "policies.py" in error


@pytest.mark.slow
def test_fp32_products_are_computed_in_tf32_if_the_recipe_asks(more: dict[str, Found]) -> None:
    assert more["tf32"].error == "" and more["tf32"].report["error"] is None
    assert "fp32 products are computed in ('highest', 'ieee')" in more["fp32"].report["error"]


@pytest.mark.slow
def test_waits_are_counted_by_line(found: dict[str, Found]) -> None:
    """Besides the one for the numbers of the step; each at its line of this package."""
    waits = found["mistakes"].report["waits"]
    assert all((Path(package.__file__).parent / wait["place"].partition(":")[0]).is_file() for wait in waits), waits
    ours = [wait for wait in waits if "policies.py" in wait["place"]]
    assert [(wait["cause"], wait["number"]) for wait in ours] == [("reading a value", 3)]
    assert found["mistakes"].report["host_waits"] == 4


READS_BACK = """
from pathlib import Path
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig
from tests.planning.simulation.test_matrix import ARCHITECTURES
from trainwright.models.files import check_saved, save_model
from trainwright.models.load import load_tokenizer
from trainwright.models.weights import build_empty_model
from trainwright.planning.simulation.device import install_files
from trainwright.planning.simulation.mode import Simulated, install
from trainwright.planning.simulation.recorders import Logs
from trainwright.recipe.sections.model import ModelSection

logs = Logs()
install(logs)
install_files()
config = AutoConfig.for_model("deepseek_v3", **ARCHITECTURES["deepseek_v3"])
tokenizer = load_tokenizer(ModelSection(config={"model_type": "deepseek_v3"}, tokenizer="bytes"))
with FakeTensorMode(allow_non_fake_inputs=True), Simulated(logs, (9, 0)):
    trained = {name: torch.empty(tensor.shape) for name, tensor in build_empty_model(config).state_dict().items()}
    assert any("e_score_correction_bias" in name for name in trained)
    checksums = save_model(Path("final"), config, trained, tokenizer)
    assert check_saved(Path("final"), checksums, torch.zeros(1, 8, dtype=torch.int64), None) is None
"""


def test_what_is_read_from_a_simulated_file_is_what_was_written(tmp_path: Path) -> None:
    """Also a buffer, whose values in the file are read, where those that were written are not known."""
    ended = python("-c", READS_BACK, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize(
    ("machine", "said"),
    [
        ("8xH1000", "no such card"),
        ("8xMI300X", "NVIDIA GPUs are simulated"),
        ("8x", "not a machine"),
        ("100000x8xH100", "at most"),
    ],
)
def test_a_machine_that_cannot_be_simulated_is_refused(machine: str, said: str) -> None:
    with pytest.raises(RequestError, match=said) as raised:
        read_simulated_machine(machine)
    assert str(raised.value).startswith("--simulate: ")


@pytest.mark.parametrize(("visible", "count"), [(None, 4), ("", 4), ("-1", 4), ("0", 1), ("3,1", 2), ("4", None)])
def test_gpus_that_the_environment_hides_are_not_simulated(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, count: int | None
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if count is None:
        with pytest.raises(RequestError, match=r"CUDA_VISIBLE_DEVICES names 4, but .* has the GPUs 0 to 3 on each"):
            read_simulated_machine("2x4xT4")
    else:
        assert read_simulated_machine("2x4xT4").devices == 2 * count


@pytest.mark.slow
def test_a_simulation_follows_an_accelerate_file(tmp_path: Path) -> None:
    text = "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}\nnum_processes: 2\nmixed_precision: bf16\n"
    words = ("train", str(TINY), "--simulate", "4xA100-80GB", "--accelerate-config", "accelerate.yaml")
    for changed, code, said in (
        (text, 0, "sft, fsdp, rank 0 of 2, bf16"),
        (text.replace("2\nmixed", "4\nmixed"), 3, "4 processes are requested, one per GPU, but there are 3 GPUs"),
        (f"{text}num_machines: 2\n", 2, "num_machines is 2, but --simulate: 4xA100-80GB has 1"),
    ):
        (tmp_path / "accelerate.yaml").write_text(changed)
        ended = trainwright(*words, cwd=tmp_path, CUDA_VISIBLE_DEVICES="0,1,2")
        assert ended.returncode == code and said in ended.stdout + ended.stderr, ended.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--simulate", "8xH1000"), "--simulate: H1000"),
        (("--simulate", "8xH100", "--nodes", "2"), "--nodes"),
        (("--max-host-syncs", "3"), "--simulate"),
        (("--most-waits", "3"), "note: --most-waits is called --max-host-syncs now"),  # its old spelling
        (("--most-waits", "3"), "--simulate"),
    ],
)
def test_options_that_do_not_fit_are_refused(tmp_path: Path, options: tuple[str, ...], said: str) -> None:
    ended = trainwright("train", str(RECIPE), *options, cwd=tmp_path)
    assert ended.returncode == 2 and said in ended.stderr


def test_without_a_compiler_the_message_says_so(tmp_path: Path) -> None:
    cache = {"TRAINWRIGHT_CACHE": str(tmp_path / "cache"), "PATH": str(tmp_path), "CXX": ""}
    ended = trainwright("train", str(RECIPE), "--simulate", "1xH100", cwd=tmp_path, **cache)
    assert ended.returncode == 3
    assert "no compiler" in ended.stderr and "CXX" in ended.stderr


@pytest.mark.slow
def test_a_budget_of_waits_fails_when_it_is_exceeded(tmp_path: Path) -> None:
    command = ("train", str(RECIPE), *SMALL, "--simulate", "1xH100")
    kept, exceeded = (trainwright(*command, "--max-host-syncs", limit, cwd=tmp_path) for limit in ("100", "0"))
    assert kept.returncode == 0 and "host waits" in kept.stdout
    assert exceeded.returncode == 4 and "--max-host-syncs 0" in exceeded.stderr
    assert list(tmp_path.iterdir()) == []  # nothing is written


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHER_TASKS)
def test_the_host_waits_once_a_step_in_other_tasks_too(more: dict[str, Found], name: str) -> None:
    assert more[name].error == "" and more[name].report["error"] is None
    assert more[name].report["host_waits"] == 1, more[name].report["waits"]
