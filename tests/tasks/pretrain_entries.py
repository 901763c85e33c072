"""What each of several processes does in the tests of pretraining."""

from __future__ import annotations

from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from tests.support.training import built
from trainwright.parallel.world import join, leave


def wrapped_by_layer(cases: list[tuple[list[str], str]]) -> None:
    """The modules that are sharded are the layers and the whole, and every parameter is."""
    world = join("cpu")
    for overrides, device in cases:
        _, _, strategy = built(world, overrides)
        sharded = [type(module).__mro__ for module in strategy.module.modules() if isinstance(module, FSDPModule)]
        names = [[kind.__name__ for kind in kinds] for kinds in sharded]
        assert sum("Phi3DecoderLayer" in kinds for kinds in names) == 4, names
        assert len(names) == 5, names
        for parameter in strategy.module.parameters():
            assert isinstance(parameter, DTensor)
            assert parameter.to_local().device.type == device
    leave()
