"""What plans predict beside what others measured and published.

    python -m tests.support.published          the table of the half that is mended on, by run, with its sources
    python bench/plan_published.py             both halves, by class

The program that is planned for is this one. Of a run of another program, the speed or the memory is compared only where
that program does what this one does, or where the difference is small: ``differences`` says what it does in another way
(docs/planning.md).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from tests.support.published_figures import config_of
from trainwright.errors import RequestError
from trainwright.machine.describe import parse_machine
from trainwright.planning.errors import Interval, build_errors, list_kinds
from trainwright.planning.memory.peak import Memory, estimate_memory
from trainwright.planning.search import Verdict
from trainwright.planning.step_time.rates import Rates
from trainwright.planning.step_time.step import estimate_step_time
from trainwright.planning.trace.request import TracedModel
from trainwright.planning.workload import Choice, Workload
from trainwright.recipe.sections.model import AdapterSection

# Of what comes and goes in a step, that torch's allocator reserves beyond what is live.
_HELD = 0.15
# Programs on transformers, and on PEFT since it keeps adapters in fp32 (0.11, 2024), under autocast.
_ON_PEFT = {"fms-hf-tuning", "ms-swift", "PEFT", "LLaMA-Factory", "Axolotl", "TRL", "Accelerate", "FastChat"}
# Bytes of a logit and its gradient where all logits exist at once, in fp32 too; and the part of what was measured below
# which they do not matter.
_LOGIT, _SMALL = 10, 0.03
_OTHER_OPERATIONS = ("updates_in_backward", "saves_inputs", "caches_keys", "keeps_outputs", "keeps_routes")
What = Literal["speed", "memory"]


@dataclass(frozen=True)
class Compared:
    """What is predicted of a figure; ``speed`` and ``memory``: over measured, None where it was not published or is
    not comparable. ``verdict``: by the errors that plans of its ``kinds`` have had. ``missing``: why it cannot be
    planned, with nothing else. ``other``: what its program does in another way, of a run of which nothing is compared.
    """

    figure: dict[str, Any]
    tokens_per_second: float = 0.0
    memory_gib: float = 0.0
    speed: float | None = None
    memory: float | None = None
    verdict: Verdict | None = None
    kinds: tuple[str, ...] = ()
    missing: str | None = None
    other: str | None = None

    @property
    def is_refused(self) -> bool:
        """It ran, and is said not to fit."""
        return self.figure["outcome"] == "ran" and self.verdict == "too large"

    @property
    def is_accepted(self) -> bool:
        """It ran out of memory, and is said to fit."""
        return self.figure["outcome"] == "oom" and self.verdict == "fits"


def compare(figure: dict[str, Any]) -> Compared:
    """Plan ``figure`` as it was run; a model or card that is not known is told, not raised."""
    try:
        cluster = parse_machine(figure["on"])
    except RequestError as problem:
        return Compared(figure, missing=str(problem).partition(";")[0])
    if config_of(figure) is None:
        return Compared(figure, missing=f"{figure['model']}: no such model in the catalog")
    speed, held = _comparable(figure, "speed"), _comparable(figure, "memory")
    if not (speed or held or (figure["outcome"] == "oom" and not any(differences(figure, "memory")))):
        return Compared(
            figure, other=", ".join(dict.fromkeys([*differences(figure, "speed"), *differences(figure, "memory")]))
        )
    workload, choice = _workload(figure, cluster.devices), _choice(figure, cluster.devices)
    time = estimate_step_time(workload, choice, cluster, Rates(cluster))
    memory = estimate_memory(workload, choice, cluster)
    each, measured = time.tokens_per_second / cluster.devices, figure["measured"]
    told = _counted(memory, measured.get("memory_kind"))
    return Compared(
        figure,
        each,
        told / 2**30,
        each / speed if speed else None,
        told / 2**30 / held if held and _is_need(figure) else None,
        _verdict(memory.total, cluster.usable_bytes, build_errors(workload, choice, cluster).memory),
        list_kinds(workload, choice, cluster),
    )


def _comparable(figure: dict[str, Any], what: What) -> float | None:
    """What was measured, if the program that was measured does what this one does."""
    key = {"speed": "tokens_per_second_per_device", "memory": "memory_gib"}[what]
    measured: float | None = figure["measured"].get(key)
    return measured if measured and not any(differences(figure, what)) else None


def _counted(memory: Memory, kind: str | None) -> float:
    """Bytes as they were counted: of tensors; of an allocator, which holds more of what comes and goes; or all."""
    if kind == "allocated":
        return memory.tensors
    if kind == "reserved":
        return memory.tensors + _HELD * (memory.tensors - min(memory.phases.values()))
    return memory.total


def _is_need(figure: dict[str, Any]) -> bool:
    """Whether what was measured is what a run needs. What an allocator has reserved after rows of many lengths is not:
    it keeps blocks of every size that came by, and gives them back before it fails."""
    even = bool(figure["packed"]) and not figure.get("varied")
    return figure["measured"]["memory_kind"] == "allocated" or even


def _verdict(needed: int, usable: int, errors: Interval) -> Verdict:
    low, high = errors.of(needed)
    return "too large" if low > usable else "close" if high > usable else "fits"


def differences(figure: dict[str, Any], what: What) -> Iterator[str]:
    """Yield what the program that was measured does in another way, as far as it changes its speed or its memory."""
    adapter, strategy, on_peft = figure["adapter"], figure["strategy"], figure["stack"] in _ON_PEFT
    yield from (key for key in _OTHER_OPERATIONS if figure.get(key))
    if figure.get("fused"):
        yield "fused kernels"
    if figure.get("attention") in ("math", "flash1", "aotriton"):
        yield "attention"
    if figure.get("experts", "grouped") != "grouped" or (on_peft and "expert" in json.dumps(config_of(figure))):
        yield "experts"
    if max(figure.get("expert_parallel") or 1, figure.get("sequence_parallel") or 1) > 1:
        yield "dimensions of the mesh"
    if figure["stack"] == "torchtitan" and figure["activation_checkpointing"] == "selective":
        yield "selective recomputation of every second product"
    if adapter is None and not figure["master_weights"]:
        yield "weights that are trained in half precision"
    if adapter is None and figure["optimizer_states"] != "fp32":
        yield "optimizer states"
    if what == "speed":
        if figure.get("sorted_rows"):
            yield "order of rows"
        return
    if adapter is None and on_peft and figure["optimizer"] == "adamw":
        yield "an optimizer that updates all weights at once"
    if strategy.startswith("zero"):
        yield "DeepSpeed's default buckets"
    if strategy == "fsdp" and on_peft:
        yield "FSDP1, which reduces in half precision and holds inputs"
    if adapter is not None and on_peft and figure["activation_checkpointing"] != "full":
        yield "inputs of adapters in fp32"
    if adapter is not None and adapter.get("quantization") and figure["stack"] == "torchtune" and strategy == "fsdp":
        yield "sharded scales"
    if (
        figure["loss"] != "chunked"
        and _logits(figure) > _SMALL * figure["measured"].get("memory_gib", math.inf) * 2**30
    ):
        yield "all logits at once"


def _logits(figure: dict[str, Any]) -> float:
    vocabulary = (config_of(figure) or {}).get("vocab_size", 50_000)
    return float(_LOGIT * vocabulary * figure["micro_batch_size"] * figure["sequence_length"])


def _workload(figure: dict[str, Any], devices: int) -> Workload:
    accumulation, adapter = figure.get("gradient_accumulation_steps") or 1, figure["adapter"]
    config = config_of(figure)
    assert config is not None, figure["id"]
    model = TracedModel.of(config)
    return Workload(
        model=model if adapter is None else model.add_adapter(_adapter(adapter)),
        row_tokens=figure["sequence_length"] // (figure.get("sequence_parallel") or 1),
        global_batch_rows=figure["micro_batch_size"] * accumulation * devices,
        packed=figure["packed"],
        document_tokens=figure.get("mean_length"),
        evaluates=False,
    )


def _adapter(adapter: dict[str, Any]) -> AdapterSection:
    renamed = {"output_proj": "o_proj"}
    targets = adapter["targets"]
    return AdapterSection(
        type="dora" if adapter["type"] == "dora" else "lora",
        rank=adapter["rank"],
        targets="all-linear" if isinstance(targets, str) else [renamed.get(name, name) for name in targets],
        dropout=adapter.get("dropout") or 0.0,
        quantization=adapter.get("quantization") or "none",
        double_quantization=bool(adapter.get("double_quantization")),
    )


def _choice(figure: dict[str, Any], devices: int) -> Choice:
    return Choice(
        strategy=figure["strategy"],
        num_processes=devices,
        micro_batch_size=figure["micro_batch_size"],
        gradient_accumulation_steps=figure.get("gradient_accumulation_steps") or 1,
        mixed_precision=figure["mixed_precision"],
        activation_checkpointing=figure["activation_checkpointing"],
        replicate_size=figure.get("replicate_size") or 1,
        reshard_after_forward=figure.get("reshard_after_forward") is not False,
        offload_parameters=bool(figure.get("offload_parameters")),
        offload_optimizer=bool(figure.get("offload_optimizer")),
        activation_offload=bool(figure.get("activation_offload")),
        compile=bool(figure.get("compile")),
    )


if __name__ == "__main__":
    from tests.support.published_table import print_runs

    print_runs()
