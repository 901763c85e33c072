"""The matrices that a plan counts for Muon are those that Muon updates."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.planning.simulation.test_matrix import ARCHITECTURES
from trainwright.machine.describe import parse_machine
from trainwright.parallel.matrix_owners import is_matrix
from trainwright.planning.memory.inventory import build_inventory
from trainwright.planning.memory.micro_batch import find_largest_micro_batch
from trainwright.planning.trace.request import TracedModel
from trainwright.planning.workload import Choice, Workload


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma3_text", "mixtral", "gpt_oss", "deepseek_v3"])
def test_matrices_are_those_of_the_model(kind: str) -> None:
    """Experts are many matrices in one parameter, which AdamW updates."""
    sizes = dict(ARCHITECTURES[kind])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes))
    updated = Counter(tuple(sorted(p.shape)) for name, p in model.named_parameters() if is_matrix(name, p.dim()))
    workload, choice = Workload(TracedModel.of({"model_type": kind, **sizes}), 256, 1), Choice("single", 1, 1, 1, "no")
    trace = workload.trace(choice, parse_machine("1xH100"), find_largest_micro_batch(workload, choice))
    planned = build_inventory(trace, 4).matrices
    assert Counter(tuple(sorted(shape)) for shape in planned) == updated
    assert all("bias" not in name for name, p in model.named_parameters() if is_matrix(name, p.dim()))
