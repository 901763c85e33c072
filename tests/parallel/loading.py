"""What each of several processes does to show how weights come to their shards."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from tests.support.runs import TINY
from tests.support.training import built
from trainwright.models.load import load_model
from trainwright.models.truncate_config import count_parameters
from trainwright.parallel.world import join, leave
from trainwright.recipe.loading import load_recipe
from trainwright.run.process import keep_freed_memory


def weights_are_those_of_one_process(cases: list[list[str]], kinds: list[str]) -> None:
    """Parameters and buffers of every case are, to the bit, those of a model that is loaded as a whole.

    ``kinds``: the class of what fills each; "NoneType" where the model is loaded as a whole after all.
    """
    world = join("cpu")
    for overrides, kind in zip(cases, kinds, strict=True):
        print(overrides, file=sys.stderr)
        _, task, strategy = built(world, overrides)
        assert type(task.weights).__name__ == kind
        recipe = load_recipe(TINY, [o for o in overrides if o.startswith("model.")])
        whole = load_model(recipe.model, torch.float32, recipe.train.seed)
        expected = {name: p.detach() for name, p in whole.named_parameters()}
        expected |= {name: b for name, b in whole.named_buffers() if name in whole.state_dict()}
        found = {name.removeprefix("model."): tensor.clone() for name, tensor in strategy.parameters()}
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
        computed = dict(whole.named_buffers())
        for name, buffer in task.module.named_buffers():
            assert torch.equal(buffer.float(), computed[name.removeprefix("model.")].float()), name
        assert task.module.model.generation_config.to_dict() == whole.generation_config.to_dict()
    leave()


def peak(overrides: list[str], output: str) -> None:
    """Write what this rank had in memory at most while its shards were filled, as a share of the whole in fp32."""
    torch.set_num_threads(1)
    keep_freed_memory()
    world = join("cpu")
    small = ("model.config.hidden_size=64", "model.config.num_hidden_layers=2", "model.config.intermediate_size=128")
    built(world, [*overrides, *small])  # what libraries need once
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what is in use now
    _, task, strategy = built(world, overrides)
    share = (resident("VmHWM") - before) / (4 * count_parameters(task.module.model.config))
    Path(output, f"{world.rank}.json").write_text(json.dumps(share))
    assert strategy.layout().held, "it is there"
    leave()


def resident(name: str) -> int:
    """Bytes of this process, from proc(5)."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return 1024 * int(line.split()[1])
