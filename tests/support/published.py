"""What plans predict beside what others measured and published.

    python -m tests.support.published          the table of the half that is mended on, by run, with its sources
    python bench/plan_published.py             both halves, by class

The engine planned for is this one, and the figures are of others: what their programs do in another way (bf16 weights
without masters, all logits at once) is told to the model of memory and time (planning/stack.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.support.published_figures import architecture_of
from trainwright.errors import RequestError
from trainwright.machine.describe import parse_machine
from trainwright.planning.architectures.architecture import Architecture
from trainwright.planning.errors import Interval, classes_of, errors_of
from trainwright.planning.memory.peak import Memory, memory_of
from trainwright.planning.search import Verdict
from trainwright.planning.stack import Attention, Stack
from trainwright.planning.step_time.rates import rates_of
from trainwright.planning.step_time.step import step_time
from trainwright.planning.workload import ALL_LINEAR, AdapterShape, Choice, Quantization, Target, Workload

# Of what comes and goes in a step, that torch's allocator reserves beyond what is live.
_HELD = 0.15
_BYTES = {"fp32": 4, "bf16": 2, "int8": 1, "paged": 0}
_ATTENTION: dict[str, Attention] = {"flash1": 1, "flash3": 3, "aotriton": "early", "math": "math"}
# Programs on transformers, whose models give logits in fp32, and on PEFT since it keeps adapters in fp32 (0.11, 2024),
# under autocast.
_ON_PEFT = {"fms-hf-tuning", "ms-swift", "PEFT", "LLaMA-Factory", "Axolotl", "TRL", "Accelerate", "FastChat"}
# Programs that compile more than the blocks.
_COMPILE_ALL = {"torchtitan", "torchtune", "nanoGPT", "PyTorch", "ml-engineering", "llm.c", "fms-fsdp", "torchao"}
# Programs that switch FSDP's sums off for all micro-batches of a step but the last (kempnerforge/training/grad.py).
_SUM_UNSHARDED = {"KempnerForge"}
_TARGETS: dict[str, tuple[Target, ...]] = {
    "q_proj": ("query",), "k_proj": ("key",), "v_proj": ("value",), "o_proj": ("output",), "output_proj": ("output",),
    "gate_proj": ("gate",), "up_proj": ("up",), "down_proj": ("down",),
}  # fmt: skip


@dataclass(frozen=True)
class Compared:
    """What is predicted of a figure; ``speed`` and ``memory``: over measured, None where it was not published or is
    not comparable. ``verdict``: by the errors that plans of its ``kinds`` have had. ``missing``: why it cannot be
    planned, with nothing else.
    """

    figure: dict[str, Any]
    tokens_per_second: float = 0.0
    memory_gib: float = 0.0
    speed: float | None = None
    memory: float | None = None
    verdict: Verdict | None = None
    kinds: tuple[str, ...] = ()
    missing: str | None = None

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
    if architecture_of(figure) is None:
        return Compared(figure, missing=f"{figure['model']}: no such model in the catalog")
    workload, choice = _workload(figure, cluster.devices), _choice(figure, cluster.devices)
    stack = _stack(figure)
    time = step_time(workload, choice, cluster, rates_of(cluster), stack)
    memory = memory_of(workload, choice, cluster, stack)
    each, measured = time.tokens_per_second / cluster.devices, figure["measured"]
    told = _counted(memory, measured.get("memory_kind"))
    speed, held = measured.get("tokens_per_second_per_device"), measured.get("memory_gib")
    return Compared(
        figure,
        each,
        told / 2**30,
        each / speed if speed else None,
        told / 2**30 / held if held and _is_need(figure) else None,
        _verdict(memory.total, cluster.usable_bytes, errors_of(workload, choice, cluster).memory),
        classes_of(workload, choice, cluster),
    )


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


def _workload(figure: dict[str, Any], devices: int) -> Workload:
    adapter = figure["adapter"]
    accumulation = figure.get("gradient_accumulation_steps") or 1
    return Workload(
        architecture=_architecture(figure),
        row_tokens=figure["sequence_length"] // (figure.get("sequence_parallel") or 1),
        global_batch_rows=figure["micro_batch_size"] * accumulation * devices,
        packed=figure["packed"],
        document_tokens=figure.get("mean_length"),
        adapter=None if adapter is None else _adapter(adapter),
        quantization=_quantization(adapter or {}),
        evaluates=False,
    )


def _adapter(adapter: dict[str, Any]) -> AdapterShape:
    kind = "dora" if adapter["type"] == "dora" else "lora"
    return AdapterShape(kind, adapter["rank"], _targets(adapter["targets"]), adapter.get("dropout") or 0.0)


def _quantization(adapter: dict[str, Any]) -> Quantization:
    kind: Quantization = adapter.get("quantization") or "none"
    return "nf4_single" if kind == "nf4" and not adapter.get("double_quantization") else kind


def _stack(figure: dict[str, Any]) -> Stack:
    """What the program that was measured does in another way than this one."""
    kept = 4 if figure["master_weights"] else 2
    # Accelerate has FSDP reduce in the precision that is computed in (utils/dataclasses.py, set_mixed_precision).
    narrow = not figure["master_weights"] or (figure["strategy"] == "fsdp" and figure["stack"] in _ON_PEFT)
    exchanged = figure.get("exchanged") or ("bf16" if narrow else "fp32")
    return Stack(
        kept=kept,
        state=_BYTES[figure.get("optimizer_states") or "fp32"],
        exchanged=_BYTES[exchanged],
        loss="widened" if figure["loss"] == "fused" and figure["stack"] in _ON_PEFT else figure["loss"],
        updates_in_backward=bool(figure.get("updates_in_backward")),
        fused=bool(figure.get("fused")),
        compiles_loss=bool(figure.get("compile")) and figure.get("compiles_loss", figure["stack"] in _COMPILE_ALL),
        attention=_ATTENTION.get(figure.get("attention") or "", 2),
        bucket=5 * 10**8 if figure["strategy"].startswith("zero") else 2**24,  # DeepSpeed's own default
        sorted_rows=figure.get("sorted_rows"),
        saves_inputs=bool(figure.get("saves_inputs")),
        expert_linears=bool(figure.get("expert_linears")) or figure["stack"] in _ON_PEFT,
        wide_adapters=figure["stack"] in _ON_PEFT,
        foreach=figure["optimizer"] == "adamw" and figure["stack"] in _ON_PEFT,
        alternates=figure["stack"] == "torchtitan",
        sums_unsharded=figure["stack"] in _SUM_UNSHARDED,
        cuts_scales=figure["stack"] == "torchtune",
        caches_keys=bool(figure.get("caches_keys")),
        keeps_outputs=bool(figure.get("keeps_outputs")),
        keeps_routes=bool(figure.get("keeps_routes")),
        fetches_ahead=False,
        grows_chunks=False,
        experts=figure.get("experts", "grouped"),
        expert_parallel=figure.get("expert_parallel") or 1,
        sequence_parallel=figure.get("sequence_parallel") or 1,
        holds_inputs=figure["stack"] in _ON_PEFT and figure.get("fsdp", 1) == 1,
    )


def _architecture(figure: dict[str, Any]) -> Architecture:
    made = architecture_of(figure)
    assert made is not None, figure["id"]
    return made


def _targets(names: str | list[str]) -> tuple[Target, ...]:
    if isinstance(names, str):
        return ALL_LINEAR
    return tuple(target for name in names for target in _TARGETS[name])


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
