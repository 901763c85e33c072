"""The matrices that a plan counts for Muon are those that Muon updates."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.planning.simulation.test_matrix import ARCHITECTURES
from trainwright.engine.optimizer import is_matrix
from trainwright.planning.architectures.configured import from_config
from trainwright.planning.memory.inventory import inventory
from trainwright.planning.memory.strategies import orthogonalized


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma3_text", "mixtral", "gpt_oss", "deepseek_v3"])
def test_matrices_are_those_of_the_model(kind: str) -> None:
    """Experts are many matrices in one parameter, which AdamW updates."""
    sizes = dict(ARCHITECTURES[kind])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes))
    updated = Counter(tuple(sorted(p.shape)) for name, p in model.named_parameters() if is_matrix(name, p))
    architecture = from_config({"model_type": kind, **sizes})
    assert architecture is not None
    planned = orthogonalized(inventory(architecture, 4, True))
    assert Counter(tuple(sorted(shape)) for shape in planned) == updated
    assert all("bias" not in name for name, p in model.named_parameters() if is_matrix(name, p))
