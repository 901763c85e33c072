"""The walk over traces written by hand: live bytes at each moment of a step, and what strategies add to them."""

from __future__ import annotations

from typing import Any

import pytest

from trainwright.planning.memory.fsdp import FsdpMemory
from trainwright.planning.memory.inventory import Inventory, build_inventory
from trainwright.planning.memory.replicated import ReplicatedMemory
from trainwright.planning.memory.walk import Flow, Order, Route, Walk
from trainwright.planning.memory.zero import ZeroMemory
from trainwright.planning.trace.units import (
    ModelFacts,
    ModelTrace,
    Moment,
    PassTrace,
    SizedModel,
    TracedParameter,
    UnitTrace,
)
from trainwright.planning.workload import Choice, OptimizerState

FACTS = ModelFacts("toy", 3, 4, 1, 1, 4, 4, 10, 0, False, 0, 0)
HIDDEN, KEPT, BLOCKS = 100, 1000, 3


def passed(*moments: tuple[str, int, int], saved: tuple[int, ...] = ()) -> PassTrace[int]:
    return PassTrace(tuple(Moment(name, (live,), after) for name, live, after in moments), saved=saved)


def block(trainable: bool = True) -> UnitTrace[int]:
    parameters = (
        TracedParameter("up.weight", (8, 4), trainable, 4),
        TracedParameter("norm.weight", (4,), trainable, 4),
    )
    ready = (("up.weight", 700, -200), ("norm.weight", 50, -900)) if trainable else ()
    return UnitTrace(
        parameters,
        forward=passed(("", 1500, KEPT), saved=(600, 300)),
        backward=passed(*ready, ("", 10, -KEPT)),
        evaluation=passed(("", 800, 0)),
    )


def model(*, trainable: bool = True, tied: bool = False) -> SizedModel:
    first = (("embed_tokens.weight", 40, -HIDDEN),) if trainable else ()
    last = (("lm_head.weight", 300, -100),) if trainable and not tied else ()
    embedding = UnitTrace(
        (TracedParameter("embed_tokens.weight", (10, 4), trainable, 4),),
        forward=passed(("", 250, HIDDEN)),
        backward=passed(*first, ("", -HIDDEN, -HIDDEN)),
        evaluation=passed(("", 250, HIDDEN)),
    )
    head = UnitTrace(
        () if tied else (TracedParameter("lm_head.weight", (10, 4), trainable, 4),),
        forward=passed(("", 2000, 400)),
        backward=passed(*last, ("", 300, -300)),
        evaluation=passed(("", 900, 0)),
    )
    return ModelTrace((embedding, block(trainable), head), (0, *[1] * BLOCKS, 2), FACTS)


def walked(model: SizedModel, flow: Flow | None = None, micro_batches: int = 1, offloads: bool = False) -> Walk:
    return Walk(route(model, flow or Flow(), micro_batches), model, model, offloads)


def route(model: SizedModel, flow: Flow, micro_batches: int = 1) -> Route:
    return Route(build_inventory(model, 4), flow, Order.of(model), Order.of(model), micro_batches)


def test_activations_pile_up_to_the_loss_and_go_in_the_backward_pass() -> None:
    walk = walked(model())
    before_head = HIDDEN + BLOCKS * KEPT
    assert walk.forward.total == before_head + 2000
    assert walk.forward.parts()["loss working set"] == 2000
    # The last block's backward pass has all that is kept, and what the head left.
    assert walk.backward.total == before_head + 400 - 300 + 700
    assert walk.evaluation.total == HIDDEN + 900


def test_most_bytes_between_blocks_are_after_the_last_ones_backward_pass() -> None:
    """Where the head has left more than the block before kept."""
    for micro_batches in (1, 2):
        most = walked(model(), micro_batches=micro_batches).most_between_blocks
        assert most == HIDDEN + (BLOCKS - 1) * KEPT + 400 - 300


def test_offloaded_activations_come_back_a_block_ahead() -> None:
    plain, moved = walked(model()), walked(model(), offloads=True)
    assert plain.forward.total - moved.forward.total == BLOCKS * 900
    # Those of the block that runs and of the one before it are on the device.
    assert plain.backward.total - moved.backward.total == (BLOCKS - 2) * 900


def test_a_unit_of_which_nothing_is_trained_has_no_gradients() -> None:
    frozen, memory = model(trainable=False), Choice("single", 1, 1, 1, "no")
    flow = ReplicatedMemory(build_inventory(frozen, 4), memory, "adamw", on_gpu=True).flow()
    assert walked(frozen, flow).backward.parts()["gradients"] == 0 == flow.allocated.total


def memory_of(kind: Any, strategy: str, held: Inventory, **changed: Any) -> Any:
    choice = {"num_processes": 2, "micro_batch_size": 1, "gradient_accumulation_steps": 1, "mixed_precision": "no"}
    return kind(held, Choice(strategy, **{**choice, **changed}), OptimizerState("adamw"), on_gpu=True)


@pytest.mark.parametrize("tied", [False, True])
def test_all_gradients_of_a_replicated_model_are_there_in_the_end(tied: bool) -> None:
    sized = model(tied=tied)
    held = build_inventory(sized, 4)
    assert held.trained == (1 if tied else 2) * 40 + BLOCKS * 36
    flow = memory_of(ReplicatedMemory, "ddp", held).flow()
    assert route(sized, flow, 2).gradients == 4 * held.trained
    assert flow.allocated.total == 0  # the evaluation began a new step


@pytest.mark.parametrize(("kind", "strategy", "copies"), [(ReplicatedMemory, "single", 1), (FsdpMemory, "fsdp", 2)])
def test_weights_without_masters_take_two_bytes_and_so_do_gradients_of_one_micro_batch(
    kind: Any, strategy: str, copies: int
) -> None:
    """Besides the masters and the fp32 gradients of the part that is updated: here all of it."""
    held = build_inventory(model(), 2)
    share = held.trained // copies
    for passes, gradients in ((1, 2 + 4), (2, 4)):
        choice = Choice(strategy, copies, 1, passes, "bf16")
        memory = kind(held, choice, OptimizerState("adamw", masters=False), on_gpu=True)
        lasting = memory.lasting()
        assert lasting["parameters"] == 2 * share
        assert lasting.get("master weights", 0) == 0
        assert memory.step() == (gradients + 4) * share


def test_fsdp_gathers_a_block_at_a_time_and_its_ends_throughout() -> None:
    sized = model()
    held = build_inventory(sized, 4)
    flow = memory_of(FsdpMemory, "fsdp", held).flow()
    flow.begin(True, True)
    ends, one = 4 * 80, 4 * (32 + 4)
    flow.forward(0)
    assert flow.allocated.gathered == 2 * ends  # with the buffer that it was gathered into
    assert flow.forward(1).gathered == 2 * ends + one
    assert flow.allocated.gathered == ends + 2 * one
    for unit in (2, 3, 4):
        flow.forward(unit)
    flow.forward_ended()
    assert flow.allocated.gathered == ends
    flow.backward(4)
    assert flow.allocated.gathered == ends + one  # of the last block, ahead
    flow.backward(3)
    flow.arrive(3, "", 36)
    assert flow.allocated.gathered == ends + 2 * one
    assert flow.unit_ended(3).total == ends + one + 4 * 36 + 4 * 36
    assert flow.allocated == (4 * 18, ends + one, 4 * 36)


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_a_step_of_zero_ends_with_what_its_stage_keeps(strategy: str) -> None:
    sized = model()
    held = build_inventory(sized, 4)
    memory = memory_of(ZeroMemory, strategy, held)
    flow = memory.flow()
    begins, begin = [], flow.begin
    flow.begin = lambda *passes: (begins.append(flow.allocated), begin(*passes))
    assert route(sized, flow, 2).gradients == begins[-1].gradients
    assert begins[-1].gathered == begins[-1].buckets == 0  # after the step, before the evaluation
    assert begins[-1].gradients < 4 * held.trained + (1 if strategy != "zero3" else 0) * 4 * held.largest
    assert memory.lasting()["optimizer state"] in (8 * held.trained // 2, 8 * -(-held.trained // 2))


def test_zero3_reduces_a_block_larger_than_a_bucket_as_its_gradients_arrive() -> None:
    """Also in the middle of a deep model, where the gradients of a block arrive all at once."""
    names = [f"experts.{number}.weight" for number in range(8)]
    large = UnitTrace(
        tuple(TracedParameter(name, (100_000, 1_000), True, 4) for name in names),
        passed(("", 1500, KEPT)),
        passed(*((name, 700, 0) for name in names), ("", 10, -KEPT)),
        passed(("", 800, 0)),
    )
    embedding, _, head = model().units
    gradients = []
    for blocks in (3, 20):
        sized = ModelTrace((embedding, large, head), (0, *[1] * blocks, 2), FACTS)
        flow = memory_of(ZeroMemory, "zero3", build_inventory(sized, 4)).flow()
        gradients.append(walked(sized, flow).backward.parts()["gradients"])
    assert gradients[0] == gradients[1] < 4 * 5 * 10**8


def test_zero3_gathers_the_embedding_before_it_prefetches_the_rest() -> None:
    """Through a copy on a CPU; what is prefetched is copied out of its buffer (AllGatherCoalescedHandle.wait)."""
    memory = ZeroMemory(
        build_inventory(model(), 4), Choice("zero3", 2, 1, 1, "no"), OptimizerState("adamw"), on_gpu=False
    )
    flow = memory.flow()
    flow.begin(True, True)
    embedding, rest = 4 * 40, 4 * (BLOCKS * 32 + 40)
    assert flow.forward(0).gathered == embedding + 2 * rest == flow.allocated.gathered


def test_zero3_releases_what_is_outside_the_blocks_after_the_last_gradients_are_reduced() -> None:
    held = build_inventory(model(), 4)
    flow = memory_of(ZeroMemory, "zero3", held).flow()
    flow.begin(True, True)
    for unit in range(held.units):
        flow.forward(unit)
    for unit in reversed(range(held.units)):
        flow.backward(unit)
        for name, numel in held.sizes[unit].items():
            flow.arrive(unit, name, numel)
    assert flow.end().gathered == 4 * (40 + 40)
    assert flow.allocated.gathered == 0


def test_zero3_releases_the_frozen_parameters_of_a_block_when_its_backward_pass_has_ended() -> None:
    embedding, _, head = model(trainable=False).units
    weights = TracedParameter("up.weight", (8, 4), False, 4), TracedParameter("lora_A.weight", (2, 4), True, 4)
    adapted = block()._replace(parameters=weights)
    held = build_inventory(ModelTrace((embedding, adapted, head), (0, *[1] * BLOCKS, 2), FACTS), 4)
    for name in ("lora_A.weight", ""):  # one by one, or all gradients of a block at once
        flow = memory_of(ZeroMemory, "zero3", held).flow()
        flow.begin(True, True)
        for unit in range(held.units):
            flow.forward(unit)
        before = flow.allocated.gathered
        for unit in reversed(range(1, BLOCKS + 1)):
            flow.backward(unit)
            flow.arrive(unit, name, 8)
            flow.unit_ended(unit)
        assert before - flow.allocated.gathered == 4 * BLOCKS * (32 + 8)


def test_one_route_serves_batches_of_every_size() -> None:
    small, flow = model(), memory_of(FsdpMemory, "fsdp", build_inventory(model(), 4)).flow()
    large = small.list_units()[1].backward._replace(
        moments=(Moment("up.weight", (10**6,), 0), *block().backward.moments[1:])
    )
    larger = ModelTrace((small.units[0], small.units[1]._replace(backward=large), small.units[2]), small.order, FACTS)
    shared = route(small, flow, 3)
    for first, later in ((small, larger), (larger, small), (small, small)):
        alone = route(first, memory_of(FsdpMemory, "fsdp", build_inventory(model(), 4)).flow(), 3)
        walks = [Walk(one, first, later) for one in (shared, alone)]
        assert walks[0].backward.parts() == walks[1].backward.parts()
        assert (walks[0].backward.total > 10**6) == (larger in (first, later))


def test_a_reference_runs_before_the_model() -> None:
    sized = model()
    beside = ModelTrace(sized.units, sized.order, FACTS, reference=(0, 1, 1, 1, 2), reference_copied=True)
    assert walked(beside).forward.total == walked(sized).forward.total
    large = UnitTrace((), PassTrace(), PassTrace(), passed(("", 10**6, 0)))
    beside = ModelTrace((*sized.units, large), sized.order, FACTS, reference=(3,))
    assert walked(beside).forward.total == 10**6
