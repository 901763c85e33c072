"""What is chosen where a recipe says auto, and what is refused because no choice goes with the rest of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.runs import TINY
from trainwright.errors import MachineError, RequestError
from trainwright.machine.accelerators import Build
from trainwright.machine.describe import Cluster, build_cluster, parse_machine
from trainwright.machine.machine import Gpu, Machine
from trainwright.machine.processor import Processor
from trainwright.planning.facts import build_facts
from trainwright.planning.plan import RunPlan, build_constraints, make_plan
from trainwright.recipe.loading import load_recipe
from trainwright.recipe.schema import RecipeSchema
from trainwright.run.resolve import Resolved, apply_implied_values, explain_no_bitsandbytes, resolve

GIB = 2**30


def machine(gpus: int = 0, cores: int = 2) -> Machine:
    return Machine("here", "Some CPU", cores, 64 * GIB, (Gpu("NVIDIA H100 80GB HBM3", 80 * GIB, (9, 0)),) * gpus)


def recipe(train: dict[str, Any] | None = None, parallel: dict[str, Any] | None = None, **data: Any) -> RecipeSchema:
    return RecipeSchema.model_validate(
        {
            "task": "sft",
            "model": {"name": "HuggingFaceTB/SmolLM2-1.7B"},
            "data": {"train": "pydoc", **data},
            "train": {"global_batch_size": 8, "mixed_precision": "no", **(train or {})},
            "parallel": parallel or {},
        }
    )


def processes(resolved: Resolved) -> tuple[int | str, str | None]:
    lines = [line for line in resolved.reasons if line.startswith("parallel.num_processes ")]
    assert len(lines) <= 1
    return resolved.recipe.parallel.num_processes, lines[0] if lines else None


@pytest.mark.slow
@pytest.mark.parametrize(("here", "count"), [(machine(4), 4), (machine(16), 8), (machine(1), 1), (machine(cores=1), 1)])
def test_processes_are_chosen_for_the_machine(here: Machine, count: int) -> None:
    found, line = processes(resolve(recipe(), here))
    assert found == count
    assert line is not None and line.startswith(f"parallel.num_processes {count}: ")


def test_a_gpu_that_no_catalog_has_is_planned_all_the_same() -> None:
    here = Machine("here", "Some CPU", 8, 64 * GIB, (Gpu("Some GPU", 80 * GIB, (9, 0)),) * 2)
    assert resolve(recipe(), here).plan.shortage is None


@pytest.mark.slow
def test_a_machine_without_a_compiler_compiles_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    here = replace(build_cluster(machine()), is_here=True)

    def planned(train: dict[str, Any], on: Cluster) -> RunPlan:
        asked = recipe({"max_steps": 10_000_000, **train})
        return make_plan(build_constraints(asked), build_facts(asked).workload, on)

    assert planned({}, replace(here, is_here=False)).chosen.choice.compile
    found = planned({}, here)
    assert not found.chosen.choice.compile
    assert any(line.startswith("train.compile false: torch.compile needs a C++ compiler") for line in found.reasons)
    with pytest.raises(MachineError, match=r"train\.compile: torch\.compile needs a C\+\+ compiler.* set .* to false"):
        planned({"compile": True}, here)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("here", "train", "parallel", "data", "count"),
    [
        (
            machine(),
            {"micro_batch_size": 2, "gradient_accumulation_steps": 4},
            {},
            {},
            1,
        ),
        (
            machine(8),
            {"micro_batch_size": 2, "gradient_accumulation_steps": 2},
            {},
            {},
            3,
        ),
        (machine(8), {"gradient_accumulation_steps": 3}, {}, {}, 3),
        (
            machine(cores=4),
            {"micro_batch_size": 2, "gradient_accumulation_steps": 1},
            {},
            {},
            4,
        ),
        (machine(5), {}, {"strategy": "fsdp", "replicate_size": 2}, {}, 4),
    ],
)
def test_batch_sizes_that_are_written_out_decide_the_number_that_fits(
    here: Machine, train: dict[str, Any], parallel: dict[str, Any], data: dict[str, Any], count: int
) -> None:
    resolved = resolve(recipe(train, parallel, **data), here)
    found, line = processes(resolved)
    assert found == count
    assert line is not None
    assert resolved.recipe.train.gradient_accumulation_steps == train.get("gradient_accumulation_steps", "auto")


def test_where_no_number_fits_the_contradiction_is_told_in_its_own_words() -> None:
    wanted = recipe({"micro_batch_size": 2, "gradient_accumulation_steps": 1})
    with pytest.raises(
        RequestError, match=r"gradient_accumulation_steps 1 x .* is not equal to train.global_batch_size 8"
    ):
        resolve(wanted, machine(cores=2))


@pytest.mark.parametrize(("validation", "kept"), [(0.1, True), ("rows.jsonl", True), (None, False)])
def test_the_best_checkpoint_is_kept_where_one_is_known(validation: object, kept: bool) -> None:
    assert resolve(recipe(validation=validation), machine()).recipe.checkpoint.keep_best is kept


def test_nodes_share_out_a_number_that_fits() -> None:
    wanted = recipe({"micro_batch_size": 1, "gradient_accumulation_steps": 2})
    assert processes(resolve(wanted, machine(4), nodes=2)) == (
        6,
        "parallel.num_processes 6: the most that the set values allow",
    )
    assert processes(resolve(recipe(), machine(cores=8), nodes=2))[0] == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parallel", "nodes", "small"),
    [
        ({"strategy": "zero3"}, 2, 4),
        ({}, 2, 4),
        ({"strategy": "zero3", "num_processes": {"min": 2, "max": 16}}, 1, 4),
        ({"num_processes": {"min": 2, "max": 16}}, 1, 16),  # where it is faster, as with auto
    ],
)
def test_processes_without_rows_hold_shards_on_nodes_and_in_a_range(
    parallel: dict[str, Any], nodes: int, small: int
) -> None:
    here = replace(machine(16 // nodes), memory_bytes=2048 * GIB)
    asked = recipe({"global_batch_size": 4}, parallel)
    assert processes(resolve(asked, here, nodes))[0] == small
    large = asked.model_copy(update={"model": asked.model.model_copy(update={"name": "google/gemma-2-27b-it"})})
    count, why = processes(resolve(large, here, nodes))
    assert count == 16 and why is not None and "4 rows; 12 processes have none and hold shards" in why


@pytest.mark.slow
def test_a_plan_names_the_attention_kernel_and_why_no_faster_one() -> None:
    def lines(here: Machine, train: dict[str, Any], **data: Any) -> tuple[str, ...]:
        return tuple(resolve(recipe(train, **data), here).plan.document["attention"])

    (line,) = lines(machine(1), {"mixed_precision": "bf16"}, pack_length=1024)
    assert line.startswith("torch's varlen flash attention (FlashAttention-4: needs compute capability 10.0 to 10.3")
    assert "; FlashAttention-3: is not assumed to be installed); " in line
    assert line.endswith("train.deterministic: true makes them bit-identical")
    (line,) = lines(machine(1), {"mixed_precision": "bf16", "deterministic": True}, pack_length=1024)
    assert line.endswith("; FlashAttention-3: is not assumed to be installed)")
    old = Machine("here", "Some CPU", 8, 64 * GIB, (Gpu("Tesla T4", 16 * GIB, (7, 5)),) * 2)
    (line,) = lines(old, {"mixed_precision": "fp16"}, pack_length=1024)
    assert "torch's varlen flash attention: needs compute capability 8.0 or higher, this GPU has 7.5" in line
    assert lines(machine(), {}, pack_length=1024) == ("torch's flash attention for CPUs, sequence by sequence",)
    assert lines(machine(), {}, pack_length=None) == ("torch's SDPA, over padded rows",)
    for instructions, why in (
        (("avx512f",), "on a processor without AMX"),
        (("avx512f", "amx_bf16"), "for sequences of less than 512 tokens"),
    ):
        here = replace(machine(), processor=Processor(instructions=instructions))
        (line,) = lines(here, {"mixed_precision": "bf16"}, pack_length=1024)
        assert line.endswith(f"sequence by sequence; backward in fp32, which is faster {why}")


def test_a_precision_that_the_gpu_does_not_have_is_refused() -> None:
    old = Machine("here", "Some CPU", 8, 64 * GIB, (Gpu("Tesla T4", 16 * GIB, (7, 5)),) * 2)
    with pytest.raises(
        MachineError, match=r"train\.mixed_precision: T4 does not compute in bf16; set it to auto, fp16 or no"
    ):
        resolve(recipe({"mixed_precision": "bf16"}), old)


@pytest.mark.parametrize(
    ("here", "said"),
    [
        (machine(), "there is no GPU, and a CPU does not compute in TF32; set it to false"),
        (
            Machine("here", "Some CPU", 8, 64 * GIB, (Gpu("Tesla T4", 16 * GIB, (7, 5)),)),
            "T4 does not compute in TF32, which needs compute capability 8.0 or higher; set it to false",
        ),
    ],
)
def test_tf32_is_refused_where_nothing_computes_in_it(here: Machine, said: str) -> None:
    with pytest.raises(MachineError) as raised:
        resolve(recipe({"tf32": True}), here)
    assert str(raised.value) == f"train.tf32: {said}"


@pytest.mark.parametrize(
    ("section", "key", "strategy"),
    [("train", "activation_offload", "single"), ("parallel", "offload_parameters", "fsdp")],
)
def test_nothing_is_offloaded_to_the_same_memory(section: str, key: str, strategy: str) -> None:
    spark = Machine("here", "Some CPU", 8, 64 * GIB, (Gpu("NVIDIA GB10", 64 * GIB, (12, 1), unified=True),))
    sections: dict[str, dict[str, Any]] = {"train": {}, "parallel": {"strategy": strategy}}
    sections[section][key] = True
    with pytest.raises(MachineError, match=rf"{section}\.{key}: NVIDIA GB10 computes in the host's memory"):
        resolve(recipe(**sections), spark)


@pytest.mark.parametrize(
    ("here", "why"),
    [
        (machine(), "needs an NVIDIA GPU, the device is a CPU"),
        (
            Machine("here", "Some CPU", 8, 64 * GIB, (Gpu("Tesla T4", 16 * GIB, (7, 5)),)),
            "needs compute capability 8.0 or higher, this GPU has 7.5",
        ),
    ],
)
def test_fused_kernels_are_refused_where_they_cannot_run(here: Machine, why: str) -> None:
    asked = recipe()
    asked = asked.model_copy(update={"model": asked.model.model_copy(update={"kernels": "triton"})})
    with pytest.raises(MachineError) as raised:
        resolve(asked, here)
    assert str(raised.value) == f"model.kernels: triton is not possible here: {why}; set it to auto or eager"


FLOAT8 = {"mixed_precision": "bf16", "float8": "rowwise"}


def test_float8_needs_a_gpu_that_has_it_or_a_cpu() -> None:
    with pytest.raises(MachineError, match=r"^train\.float8: A100-80GB does not compute in float8, which needs"):
        apply_implied_values(recipe(FLOAT8), parse_machine("8xA100-80GB"))
    for scales in ("mxfp8", "nvfp4"):
        blocks, why = recipe({**FLOAT8, "float8": scales}), rf"does not compute in {scales.upper()}, .* 10\.0 or higher"
        for machine_, instead in (("8xH100", "rowwise"), ("8xA100-80GB", "no")):
            with pytest.raises(MachineError, match=rf"{why}; set it to {instead}$"):
                apply_implied_values(blocks, parse_machine(machine_))
        apply_implied_values(blocks, parse_machine("1xRTX5090"))
    _, remarks = apply_implied_values(recipe({**FLOAT8, "compile": False}), parse_machine("8xH100"))
    assert any("without train.compile" in remark for remark in remarks)
    _, remarks = apply_implied_values(recipe(FLOAT8), parse_machine("8xH100"))
    assert not any("float8" in remark for remark in remarks)
    _, remarks = apply_implied_values(recipe(FLOAT8), build_cluster(machine()))
    assert any("train.float8: a CPU rounds" in remark for remark in remarks)


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        (["train.mixed_precision=no"], ("train.float8", "train.mixed_precision")),
        (["model.adapter.type=lora"], ("train.float8", "model.adapter.type")),
    ],
)
def test_float8_contradicts_what_it_is_not_for(overrides: list[str], keys: tuple[str, str]) -> None:
    asked = ["train.mixed_precision=bf16", "train.float8=rowwise", *overrides]
    with pytest.raises(RequestError) as raised:
        load_recipe(TINY, asked)
    assert all(key in str(raised.value) for key in keys)


@pytest.mark.slow
def test_tf32_that_is_no_faster_is_remarked() -> None:
    cards = Machine("here", "Some CPU", 8, 64 * GIB, (Gpu("NVIDIA GeForce RTX 3090", 24 * GIB, (8, 6)),))
    assert any("TF32 no faster than in fp32" in line for line in resolve(recipe({"tf32": True}), cards).reasons)


@pytest.mark.parametrize("written", [True, False])
def test_a_layout_key_of_the_recipe_is_kept_also_with_its_default_value(written: bool) -> None:
    asked = recipe(parallel={"reshard_after_forward": written})
    assert build_constraints(asked).fixed["reshard_after_forward"] is written
    assert "reshard_after_forward" not in build_constraints(recipe()).fixed


@pytest.mark.parametrize(
    ("device", "train", "parallel", "said"),
    [
        (
            "2xB580",
            {},
            {"strategy": "zero2"},
            r"^parallel\.strategy: zero2 is not possible on GPUs of Intel: DeepSpeed",
        ),
        ("2xB580", {"tf32": True}, {}, r"^train\.tf32 is not possible on GPUs of Intel: "),
        ("8xMI300X", {"tf32": True}, {}, r"^train\.tf32 is not possible on GPUs of AMD: "),
        (
            "8xMI300X",
            {"mixed_precision": "bf16", "float8": "rowwise"},
            {},
            r"^train\.float8: needs an NVIDIA GPU, MI300X is one of AMD; set it to no",
        ),
    ],
)
def test_what_gpus_of_another_vendor_lack_is_refused_by_name(
    device: str, train: dict[str, Any], parallel: dict[str, Any], said: str
) -> None:
    with pytest.raises(MachineError, match=said):
        apply_implied_values(recipe(train, parallel), parse_machine(device))
    apply_implied_values(recipe(), parse_machine(device))
    apply_implied_values(recipe(parallel={"strategy": "zero2"}), parse_machine("8xMI300X"))


def test_bitsandbytes_has_kernels_for_the_versions_of_rocm_that_its_wheels_name() -> None:
    assert explain_no_bitsandbytes("AMD", Build("2.13.0", None, "7.2.53211")) is None
    said = explain_no_bitsandbytes("AMD", Build("2.13.0", None, "9.9.1"))
    assert said == "the installed bitsandbytes has no kernels for ROCm 9.9.1"
    assert explain_no_bitsandbytes("NVIDIA", Build("2.13.0", "13.0")) is None
