"""Process groups: what they exchange, how long they wait, and when they are left."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.distributed_c10d import _set_pg_timeout, _world
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from tests.parallel.generation import step
from tests.support.commands import machine_file
from tests.support.runs import ON_ROWS, TINY, Runs
from tests.support.training import built, trainer_of
from trainwright.engine.checkpoints.checkpoint import Checkpoints
from trainwright.engine.checkpoints.checkpointing import Checkpointing
from trainwright.engine.checkpoints.export import export, gather_parameters
from trainwright.engine.checkpoints.manifest import remove
from trainwright.inference.answering import split_into_batches
from trainwright.machine.detect import detect
from trainwright.parallel.fsdp.fully_sharded import _build_mesh
from trainwright.parallel.layout import Shard
from trainwright.parallel.world import choose_backends, join, leave, report_collectives
from trainwright.parallel.zero.partitions import ParameterPiece, build_row_blocks, split_into_chunks
from trainwright.recipe.loading import load_recipe
from trainwright.recipe.schema import RecipeSchema
from trainwright.run import run_directory
from trainwright.run.resolve import resolve
from trainwright.run.run_worker import Worker, run_worker
from trainwright.utils import heartbeat
from trainwright.utils.heartbeat import build_heartbeat_path, read

HERE = "tests.parallel.test_world:"


def report_groups(directory: str) -> None:
    rank = int(os.environ["RANK"])
    heartbeat.begin(Path(directory), rank)
    report_collectives()
    join("cpu")
    first, both = dist.new_group([0]), dist.new_group([0, 1])

    def seen() -> tuple[int, int]:
        beat = read(build_heartbeat_path(Path(directory), rank))
        assert beat is not None
        return beat.entered, beat.marks

    entered, marks = seen()
    dist.barrier(first)
    dist.all_reduce(torch.ones(3), dist.ReduceOp.SUM, first)
    dist.all_reduce(torch.ones(3), group=first)
    assert seen() == (entered, marks + (6 if rank == 0 else 0)), "the calls of a rank outside of the group do nothing"
    dist.barrier(both)
    dist.all_reduce(torch.ones(3), dist.ReduceOp.SUM, both)
    dist.all_reduce(torch.ones(3))
    assert seen()[0] == entered + 3
    leave()


def test_only_collectives_of_all_ranks_are_numbered_however_their_group_is_given(runs: Runs, tmp_path: Path) -> None:
    runs.function(HERE + report_groups.__name__, str(tmp_path), processes=2)


def exchange_masters_on_hosts() -> None:
    # A group as for GPUs, but without NCCL, which CPU builds of torch do not have.
    dist.init_process_group(choose_backends(torch.device("cuda", 0)).replace("nccl", "fake"))
    rank, size, shape = dist.get_rank(), dist.get_world_size(), (7, 5)
    whole, ranges = torch.arange(35.0), split_into_chunks(35, size)
    begin, end = ranges[rank]
    piece = ParameterPiece(shape, ranges, begin, end - begin, group=0, position=0)
    shard = build_row_blocks({"w": (piece, whole[begin:end])}, rank, size)["w"]
    rows = slice(shard.offset[0], shard.offset[0] + len(shard.local))
    assert torch.equal(shard.local, whole.view(shape)[rows])
    leave()


def test_offloaded_optimizer_states_are_exchanged_between_hosts(runs: Runs) -> None:
    runs.function(HERE + exchange_masters_on_hosts.__name__, processes=2)


def test_tensors_on_gpus_are_exchanged_by_nccl() -> None:
    config = dist.BackendConfig(dist.Backend(choose_backends(torch.device("cuda", 0))))
    assert config.get_device_backend_map() == {"cpu": "gloo", "cuda": "nccl"}


def join_late() -> None:
    if os.environ["RANK"] == "0":
        time.sleep(5)  # it loads a model
    world = join("cpu", timeout=timedelta(seconds=2))
    assert world.gather(world.rank) == [0, 1]
    leave()


@pytest.mark.slow
def test_the_timeout_of_collectives_does_not_limit_how_long_a_rank_may_load(runs: Runs) -> None:
    runs.function(HERE + join_late.__name__, processes=2)


def wait_for_slow_hosts() -> None:
    world = join("cpu")
    _set_pg_timeout(timedelta(milliseconds=200), dist.group.WORLD)
    for number, wait in enumerate((world.broadcast, world.gather, lambda value: world.barrier())):
        if world.is_main:
            time.sleep(0.6)
        assert wait(number) in (number, [number] * world.size, None)
    leave()


def test_hosts_wait_longer_than_collectives_for_what_one_of_them_writes(runs: Runs) -> None:
    runs.function(HERE + wait_for_slow_hosts.__name__, processes=2)


def write_slowly(directory: str) -> None:
    """Rank 0 writes and removes on a disk that takes three times as long as a collective may."""
    late = 0.6
    world = replace(join("cpu"), stop_requested=lambda: False)
    place = Path(directory)

    class RemovesSlowly(Checkpoints):
        def prune(
            self, best: int | None, remove: Callable[[Path], None] = remove, trusted_before: int | None = None
        ) -> None:
            time.sleep(late)
            super().prune(best, remove, trusted_before)

    def slowly(tensors: Iterator[Any]) -> Iterator[Any]:
        for number, tensor in enumerate(tensors):
            if number < 2:
                time.sleep(late)
            yield tensor

    trainer, _ = trainer_of(world, ["parallel.strategy=fsdp"], place / "run")
    task, strategy = trainer.training.task, trainer.training.strategy
    write = task.export
    task.export = lambda tensors, final: write(slowly(tensors), final)  # type: ignore[method-assign]
    _set_pg_timeout(timedelta(milliseconds=200), dist.group.WORLD)
    for saved in (None, 1):
        export(task, strategy, place / f"saved-{saved}", 1, saved)
    checkpointing = Checkpointing(trainer.training, RemovesSlowly(place / "run", keep_last=1, keep_best=False), ())
    checkpointing.save(required=True)
    world.sum([1.0])  # as the next step would
    leave()


@pytest.mark.slow
def test_ranks_wait_longer_than_collectives_for_a_slow_disk(runs: Runs, tmp_path: Path) -> None:
    runs.function(HERE + write_slowly.__name__, str(tmp_path), processes=2)
    assert (tmp_path / "saved-None" / "model.safetensors").exists()


def make_hybrid_groups() -> None:
    timeout = timedelta(minutes=7)
    world = join("cpu", timeout=timeout)
    mesh = _build_mesh(world, 2)
    assert mesh.shape == (2, 2) and mesh.mesh.tolist() == [[0, 1], [2, 3]]
    for name, ranks in (("shard", [[0, 1], [2, 3]]), ("replicate", [[0, 2], [1, 3]])):
        group: Any = mesh.get_group(name)
        assert group._get_backend(torch.device("cpu")).options._timeout == timeout
        assert dist.get_process_group_ranks(group) in ranks
        assert world.rank in dist.get_process_group_ranks(group)
    leave()


def test_groups_of_some_ranks_have_the_timeout_of_all(runs: Runs) -> None:
    runs.function(HERE + make_hybrid_groups.__name__, processes=4)


def make_groups_of_deepspeed() -> None:
    timeout = timedelta(minutes=7)
    world = join("cpu", timeout=timeout)
    for strategy in ("zero1", "zero2", "zero3"):
        _, task, made = built(world, [f"parallel.strategy={strategy}", "train.micro_batch_size=1"])
        step(task, made)
    groups = {group for group in _world.pg_map if group is not world.hosts}
    assert groups - {dist.group.WORLD}, "it makes groups of its own"
    assert {group._get_backend(torch.device("cpu")).options._timeout for group in groups} == {timeout}
    leave()


@pytest.mark.slow
def test_groups_of_deepspeed_have_the_timeout_of_all(runs: Runs) -> None:
    runs.function(HERE + make_groups_of_deepspeed.__name__, processes=2)


def batch_with_unequal_memory(directory: str) -> None:
    rank = int(os.environ["RANK"])
    own = Path(directory, str(rank))
    own.mkdir()
    memory = (64 * 2**20, 256 * 2**20)[rank]
    os.environ["TRAINWRIGHT_MACHINE"] = machine_file(own, memory_bytes=memory, memory_free_bytes=memory)
    world = join("cpu")
    sizes = {"hidden_size": 256, "intermediate_size": 64, "num_hidden_layers": 8, "num_attention_heads": 4}
    config = AutoConfig.for_model("llama", vocab_size=512, **sizes)
    model = AutoModelForCausalLM.from_config(config)
    memories = world.gather(detect().usable_bytes)
    assert memories[0] < memories[1]
    batches = split_into_batches(model, [400] * 16, world)
    assert len(batches) > 1
    assert world.gather(batches) == [batches, batches]
    leave()


def test_ranks_with_unequal_memory_answer_the_same_batches(runs: Runs, tmp_path: Path) -> None:
    runs.function(HERE + batch_with_unequal_memory.__name__, str(tmp_path), processes=2)


def fail_in_a_group(directory: str) -> None:
    run = Path(directory, "run")
    fixed = [ON_ROWS, "parallel.strategy=fsdp", "parallel.num_processes=1", "logging.observers.tensorboard=false"]
    run.mkdir()
    text = run_directory.format_recipe(resolve(load_recipe(TINY, fixed), detect()).recipe)
    run_directory.record(run, text, "tiny", [])

    def observers(recipe: RecipeSchema) -> list[Any]:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_worker(Worker(run), observers=observers)
    assert dist.is_initialized()


def test_a_rank_that_fails_reports_it_before_it_waits_for_the_others(runs: Runs, tmp_path: Path) -> None:
    runs.function(HERE + fail_in_a_group.__name__, str(tmp_path))


class _Compared(TorchDispatchMode):
    """Notes the devices of tensors that are compared; fake tensors have no values to compare."""

    def __init__(self) -> None:
        super().__init__()
        self.devices: list[set[str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.equal.default:
            return func(*args, **(kwargs or {}))
        self.devices.append({tensor.device.type for tensor in args})
        return True


def compare_adapters() -> None:
    with FakeTensorMode(), _Compared() as compared:
        local = torch.zeros(2, 3)
        # As a strategy gives them: masters offloaded to the host, gathered parameters on the GPU.
        strategy: Any = SimpleNamespace(
            state=lambda: {"model.w": Shard(local, (4, 3), (2, 0))},
            parameters=lambda frozen: iter([("w", torch.empty(4, 3, device="cuda"))]),
        )
        different: list[str] = []
        assert [name for name, _ in gather_parameters(strategy, different)] == ["w"]
    assert compared.devices == [{"cpu"}]
    assert not different


@pytest.mark.slow
def test_adapters_are_compared_on_one_device() -> None:
    # Builds of torch for CPUs index no tensor on a GPU without the shim, which is loaded before torch.
    code = "from trainwright.planning.simulation.start import load_simulated_device; load_simulated_device(); "
    code += "import tests.parallel.test_world as here; "
    subprocess.run([sys.executable, "-c", code + f"here.{compare_adapters.__name__}()"], check=True)
