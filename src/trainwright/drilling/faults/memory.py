"""Memory that runs out while a run trains."""

from __future__ import annotations

import resource

from trainwright.drilling import phases, promises
from trainwright.drilling.faults.kills import started
from trainwright.drilling.kinds import ANY, fault
from trainwright.drilling.scene import FAILED, FINISHED, MACHINE, Scene


@fault(
    "an address space that is limited later", spreads=ANY, phases=phases.TRAINING, variants=("0", "1", "8"), share=1.5
)
def limited_addresses(scene: Scene) -> None:
    """A worker's memory is limited to what it has plus some MiB: smaller micro-batches, or a clear error."""
    halvable = scene.setting.halvable
    command = started(scene, *halvable)
    workers = scene.workers(command)
    rank = scene.draw.choice(list(workers))
    with open(f"/proc/{workers[rank]}/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize() + int(scene.variant) * 2**20
    resource.prlimit(workers[rank], resource.RLIMIT_AS, (size, size))
    ended = scene.wait(command)
    scene.expect(ended, (FINISHED, FAILED, MACHINE), "memory")
    promises.checkpoints_complete(scene.run)
    if ended.code == FINISHED:
        scene.as_undisturbed(halvable, exact=False)
    else:
        scene.resumes(overrides=halvable, exact=False)
