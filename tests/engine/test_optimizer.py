"""What the optimizers decay, and with which learning rate."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trainwright.engine.optimizer import build_optimizer_factory
from trainwright.recipe.schema import OptimizerSection

RATE, DECAY = 0.1, 0.5
DECAYED = {"embed_tokens.weight", "block.linear.weight", "lm_head.weight"}


class SmallModel(nn.Module):
    """An embedding, a block with a matrix, biases and norms, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(5, 4)
        self.block = nn.ModuleDict({"norm": nn.LayerNorm(4), "linear": nn.Linear(4, 3), "rms": nn.RMSNorm(3)})
        self.lm_head = nn.Linear(3, 5)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_matrices_are_decayed_and_norms_and_biases_are_not(name: str) -> None:
    model = SmallModel()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
            parameter.grad = torch.zeros_like(parameter)  # so that the decay is all that changes
    section = OptimizerSection.model_validate({"name": name, "learning_rate": RATE, "weight_decay": DECAY})
    build_optimizer_factory(section)(model.named_parameters()).step()
    for parameter_name, parameter in model.named_parameters():
        expected = 1 - RATE * DECAY if parameter_name in DECAYED else 1.0
        torch.testing.assert_close(parameter.data, torch.full_like(parameter, expected), msg=parameter_name)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_every_parameter_is_in_one_group(name: str) -> None:
    model = SmallModel()
    optimizer = build_optimizer_factory(OptimizerSection.model_validate({"name": name}))(model.named_parameters())
    grouped = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    assert sorted(grouped) == sorted(map(id, model.parameters()))
