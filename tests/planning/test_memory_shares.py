"""What a plan's memory does not count, and what it does: frozen weights, copies of hybrid sharding, activations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from trainwright.machine.describe import parse_machine
from trainwright.planning.memory.peak import Memory, estimate_memory
from trainwright.planning.trace.catalog import find_model
from trainwright.planning.trace.request import TracedModel
from trainwright.planning.workload import Choice, Workload
from trainwright.recipe.sections.model import AdapterSection

MODEL = TracedModel.of(find_model("HuggingFaceTB/SmolLM2-135M").config)
PARAMETERS, LAYERS, HIDDEN, INTERMEDIATE = 134_515_008, 30, 576, 1536
WORKLOAD = Workload(MODEL, row_tokens=512, global_batch_rows=16)


def predicted(strategy: Any, processes: int, workload: Workload = WORKLOAD, **changed: Any) -> Memory:
    choice = Choice(strategy, processes, 2, 1, "bf16")
    return estimate_memory(workload, replace(choice, **changed), parse_machine("8xA100-80GB"))


@pytest.mark.parametrize(("processes", "replicas"), [(4, 2), (8, 2), (8, 4)])
def test_hybrid_sharding_divides_by_the_ranks_that_share_a_copy(processes: int, replicas: int) -> None:
    hybrid = predicted("fsdp", processes, replicate_size=replicas).parts
    plain = predicted("fsdp", processes // replicas).parts
    for name in ("parameters", "optimizer state"):
        assert hybrid[name] == plain[name]
        assert hybrid[name] == pytest.approx(
            PARAMETERS * (4 if name == "parameters" else 8) * replicas / processes, rel=0.01
        )


@pytest.mark.parametrize("strategy", ["single", "fsdp", "zero2"])
def test_frozen_weights_have_neither_gradients_nor_masters_nor_moments(strategy: str) -> None:
    adapter = AdapterSection(type="lora", rank=8, targets=["q_proj", "v_proj"])
    processes = 1 if strategy == "single" else 4
    parts = predicted(strategy, processes, replace(WORKLOAD, model=MODEL.add_adapter(adapter))).parts
    for name in ("master weights", "optimizer state", "gradients"):
        assert parts.get(name, 0) < 0.2 * PARAMETERS, name


def test_what_blocks_keep_grows_with_the_blocks_and_the_tokens() -> None:
    plain = predicted("single", 1)
    long = predicted("single", 1, replace(WORKLOAD, row_tokens=1024))
    recomputed = predicted("single", 1, activation_checkpointing="full")
    # Of every token and block at least its input, the queries, keys and values, and the three of the product.
    least = 2 * 2 * 512 * LAYERS * (HIDDEN + 3 * INTERMEDIATE)
    for phase in ("forward", "backward"):
        grown = long.phases[phase] - plain.phases[phase]
        assert grown >= least, phase
        assert plain.phases[phase] - recomputed.phases[phase] >= 0.5 * least, phase
