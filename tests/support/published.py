"""What plans predict beside what others measured and published.

    python -m tests.support.published          the table, with the source of each figure

The engine planned for is this one, and the figures are of others: what they do in another way (bf16 weights without
masters, all logits at once) is left out of the comparison of memory, and counts little for speed.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainwright.machine.describe import parse_machine
from trainwright.planning.architecture import Architecture, from_config
from trainwright.planning.memory import memory_of
from trainwright.planning.model_catalogue import find_model
from trainwright.planning.rates import rates_of
from trainwright.planning.step_time import step_time
from trainwright.planning.workload import ALL_LINEAR, Adapter, Choice, Target, Workload

FILE = Path(__file__).parents[1] / "planning" / "published.json"
_TARGETS: dict[str, tuple[Target, ...]] = {
    "q_proj": ("query",), "k_proj": ("key",), "v_proj": ("value",), "o_proj": ("output",), "output_proj": ("output",),
    "gate_proj": ("gate",), "up_proj": ("up",), "down_proj": ("down",),
}  # fmt: skip


@dataclass(frozen=True)
class Compared:
    """Predicted over measured, each None where it was not published or is not comparable."""

    figure: dict[str, Any]
    tokens_per_second: float
    memory_gib: float
    speed: float | None
    memory: float | None


def figures() -> list[dict[str, Any]]:
    content: list[dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))["figures"]
    return content


def compare(figure: dict[str, Any]) -> Compared:
    cluster = parse_machine(figure["on"])
    workload, choice = _workload(figure, cluster.devices), _choice(figure, cluster.devices)
    time = step_time(workload, choice, cluster, rates_of(cluster))
    memory = memory_of(workload, choice, cluster)
    each, gib = time.tokens_per_second / cluster.devices, memory.total / 2**30
    if figure["measured"].get("memory_kind") == "allocated":
        gib = memory.tensors / 2**30
    measured = figure["measured"]
    speed, held = measured.get("tokens_per_second_per_device"), measured.get("memory_gib")
    return Compared(
        figure,
        each,
        gib,
        each / speed if speed else None,
        gib / held if held and _same_memory(figure) else None,
    )


def errors(values: Iterator[float | None]) -> list[float]:
    return sorted(abs(value - 1) for value in values if value is not None)


def _workload(figure: dict[str, Any], devices: int) -> Workload:
    adapter = figure["adapter"]
    accumulation = figure.get("gradient_accumulation_steps") or 1
    return Workload(
        architecture=_architecture(figure),
        row_tokens=figure["sequence_length"],
        global_batch_rows=figure["micro_batch_size"] * accumulation * devices,
        packed=figure["packed"],
        document_tokens=figure.get("mean_length"),
        adapter=None if adapter is None else Adapter("lora", adapter["rank"], _targets(adapter["targets"])),
        quantisation=(adapter or {}).get("quantisation") or "none",
        evaluates=False,
    )


def _architecture(figure: dict[str, Any]) -> Architecture:
    if "config" in figure:
        made = from_config(figure["config"], figure["id"])
        assert made is not None, figure["id"]
        return made
    return find_model(figure["model"]).architecture()


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


def _same_memory(figure: dict[str, Any]) -> bool:
    """Whether what holds memory there is what holds it here."""
    trained_whole = figure["adapter"] is None
    return (
        figure["optimizer"] == "adamw"
        and figure.get("optimizer_states") == "fp32"
        and (figure["master_weights"] or not trained_whole)
        and figure.get("attention") != "math"
        and figure["packed"]
    )


def main() -> None:
    compared = [compare(figure) for figure in figures()]
    print(f"{'run':<58}{'tokens/s':>10}{'measured':>10}{'error':>8}{'GiB':>8}{'measured':>10}{'error':>8}")
    for one in compared:
        measured = one.figure["measured"]
        speed = measured.get("tokens_per_second_per_device")
        print(
            f"{one.figure['id']:<58}{one.tokens_per_second:>10,.0f}{speed or '-':>10}"
            f"{'-' if one.speed is None else f'{one.speed - 1:+.0%}':>8}{one.memory_gib:>8.1f}"
            f"{measured.get('memory_gib') or '-':>10}{'-' if one.memory is None else f'{one.memory - 1:+.0%}':>8}"
        )
    for name in ("speed", "memory"):
        found = errors(getattr(one, name) for one in compared)
        if found:
            print(f"{name}: {len(found)} figures, median error {statistics.median(found):.0%}")
    print("\nsources:")
    for title, url in dict.fromkeys((f["source"]["title"], f["source"]["url"]) for f in figures()):
        print(f"  {title}: {url}")


if __name__ == "__main__":
    main()
