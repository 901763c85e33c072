"""Translation of an Accelerate file: recipe keys, processes and machines, and notes on everything else."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from trainwright.compatibility.accelerate import strategies
from trainwright.compatibility.accelerate.reading import (
    AccelerateConfig,
    ConfigProblem,
    ConfigSection,
    Draft,
    Note,
    RecipeValue,
    read,
)
from trainwright.errors import RequestError, TrainwrightError
from trainwright.recipe.loading import Override, read_merged
from trainwright.recipe.strategy_spec import look_up_strategy
from trainwright.recipe.yaml_text import Origin, Tree
from trainwright.run.group.addresses import format_address

DEFAULT_PORT = 29500  # Accelerate's and torchrun's

Device = Literal["cuda", "cpu", "any"]

_DISTRIBUTED = ("NO", "MULTI_GPU", "MULTI_CPU", "FSDP", "DEEPSPEED")
_OTHERS = {
    "MEGATRON_LM": "Megatron-LM",
    "XLA": "TPUs",
    "TPU": "TPUs",
    "MULTI_NPU": "NPUs",
    "MULTI_MLU": "MLUs",
    "MULTI_SDAA": "SDAA devices",
    "MULTI_MUSA": "MUSA devices",
    "MULTI_XPU": "XPUs",
    "MULTI_HPU": "HPUs",
    "MULTI_NEURON": "Neuron cores",
    "MPS": "Apple's GPUs",
    "TP": "tensor parallelism alone",
}
_PRECISIONS = ("NO", "BF16", "FP16", "FP8")
_TPU_KEYS = ("tpu_name", "tpu_zone", "tpu_vm", "tpu_env", "tpu_use_cluster", "tpu_use_sudo", "commands")
_PARTS = (
    *("fsdp_config", "deepspeed_config", "dynamo_config", "parallelism_config", "fp8_config", "mpirun_config"),
    *("megatron_lm_config", "ipex_config", "tp_config"),
)
_PLAIN_KEYS = (
    *("compute_environment", "distributed_type", "mixed_precision", "num_processes", "num_machines", "machine_rank"),
    *("main_process_ip", "main_process_port", "gpu_ids", "use_cpu", "rdzv_backend", "same_network", "downcast_bf16"),
    *("dynamo_backend", "main_training_function", "enable_cpu_affinity", "gradient_accumulation_steps"),
)


# Keys that only apply to the strategy that the file names.
_OF_THE_STRATEGY = (
    *("parallel.replicate_size", "parallel.reshard_after_forward", "parallel.offload_parameters"),
    *("parallel.offload_optimizer", "parallel.wrap", "parallel.deepspeed_config"),
)


@dataclass(frozen=True)
class Translation:
    """An Accelerate file (or environment) translated to Trainwright's terms.

    Attributes:
        source: the path of the file, or a description of another source.
        distributed_type: Accelerate's name, for messages.
        settings: recipe keys, such as parallel.strategy, each with its value and origin.
        device: the device for the processes; any: GPUs if there are some.
        gpu_ids: the GPUs of this machine to use, in the format of CUDA_VISIBLE_DEVICES; None: all.
        processes: of all machines together; None if unknown.
        nodes, node_rank, rendezvous: number of machines, index of this one, and host:port of the first.
        one_of_several: Accelerate's launcher was asked for several processes and started only this one.
        notes: what is ignored or done differently, and why.
        problems: what is not supported or contradictory.
        refusal: why a process that Accelerate's launcher has started cannot train, or None.
    """

    source: str
    distributed_type: str
    settings: Mapping[str, RecipeValue]
    device: Device
    gpu_ids: str | None
    processes: int | None
    nodes: int
    node_rank: int
    rendezvous: str | None
    one_of_several: bool
    notes: tuple[Note, ...]
    problems: tuple[ConfigProblem, ...]
    refusal: TrainwrightError | None = None

    @property
    def strategy(self) -> str | None:
        """Return the strategy that the file asks for; None if it names none."""
        return self.value("parallel.strategy")

    @property
    def local_processes(self) -> int | None:
        """Return the number of processes on one machine."""
        return None if self.processes is None else max(1, self.processes // self.nodes)

    def value(self, key: str) -> Any:
        """Return the value of a recipe key; None if the file does not set it."""
        return self.settings[key].value if key in self.settings else None

    def over(
        self, recipe: Path | Tree, overrides: Sequence[str], *, resumed: bool = False
    ) -> tuple[list[str], tuple[str, ...]]:
        """Return overrides of the recipe at ``recipe``, these settings first and then the user's own; and notes.

        A setting is for a key that the recipe leaves to auto or to its default; another value is overridden, with a
        note. The strategy is not: if recipe and file name different ones, RequestError names both. The recipe of a
        ``resumed`` run has every key, so there the strategy is overridden, too.
        """
        self.refuse_problems()
        explicit = {override.partition("=")[0].strip() for override in overrides}
        reasons = [
            f"{key}: the command line's value, not {self.settings[key].origin}"
            for key in self.settings
            if key in explicit
        ]
        dropped_keys = set(explicit)
        if "parallel.strategy" in explicit and find_last_value(overrides, "parallel.strategy") != self.strategy:
            dropped_keys |= set(_OF_THE_STRATEGY)
        merged_recipe = read_merged(recipe, ())
        for key, setting in self.settings.items():
            recipe_value = _look_up_value(merged_recipe, key)
            if key in dropped_keys or recipe_value in (None, "auto", setting.value):
                continue
            origin = merged_recipe.origins.get(tuple(key.split(".")), recipe)
            entry = f"{origin}: {key} is {format_override_value(recipe_value)}"
            if key == "parallel.strategy" and not resumed:
                raise RequestError(
                    f"{entry}, but {setting.origin} means {setting.value}; remove one of the two, or set {key}=… on "
                    "the command line"
                )
            if not resumed:
                reasons.append(f"{entry}, replaced by {format_override_value(setting.value)}: {setting.origin}")
        reasons += [f"{self.source}: {', '.join(note.keys)}: {note.reason}" for note in self.notes]
        remaining = replace(self, settings={k: v for k, v in self.settings.items() if k not in dropped_keys})
        return [*remaining.to_overrides(), *overrides], tuple(reasons)

    def to_overrides(self) -> list[Override]:
        """Return `section.key=value` for every recipe key that the file sets. Raises RequestError for its problems."""
        self.refuse_problems()
        return [
            Override.written(f"{key}={format_override_value(setting.value)}", Origin(setting.origin))
            for key, setting in self.settings.items()
        ]

    def refuse_problems(self, *, for_script: bool = False) -> None:
        """Raise RequestError with the problems: all of them, or those that concern the user's own script."""
        texts = [problem.text for problem in self.problems if problem.for_script or not for_script]
        if texts:
            raise RequestError("\n".join(texts))

    def build_device_environment(self) -> dict[str, str]:
        """Return the variables that hide unwanted GPUs; set them before anything queries the GPUs."""
        if self.device == "cpu":
            return {"CUDA_VISIBLE_DEVICES": ""}
        return {} if self.gpu_ids is None else {"CUDA_VISIBLE_DEVICES": self.gpu_ids}

    def set_machines(
        self, nodes: int | None = None, node_rank: int | None = None, rendezvous: str | None = None
    ) -> Translation:
        """Return a copy in which the values of the command line for the machines replace those of the file."""
        return replace(
            self,
            nodes=self.nodes if nodes is None else nodes,
            node_rank=self.node_rank if node_rank is None else node_rank,
            rendezvous=self.rendezvous if rendezvous is None else rendezvous,
        )


def read_translation(path: Path) -> Translation:
    """Read and translate a file. Raises RequestError if it cannot be read."""
    return interpret(read(path))


def interpret(source: AccelerateConfig) -> Translation:
    """Translate a source. All its faults are listed in the result's ``problems``."""
    top, draft = ConfigSection(source), Draft()
    for text in source.problems:
        draft.problem(text, for_script=True)
    if source.one_of_several:
        draft.problem(
            "accelerate launch starts only one process with MULTI_CPU; start several with `trainwright train RECIPE "
            "--accelerate-config FILE` or torchrun"
        )
    kind = _read_kind(top, draft)
    processes, nodes = _read_counts(top, draft, kind)
    _read_precision(top, draft)
    _read_compile(top, draft)
    part = ConfigSection(source, ("parallelism_config",), _SIZES_PREFIX)
    sizes = _read_sizes(part, draft)
    parts = [top, part]
    if kind == "FSDP":
        part = ConfigSection(source, ("fsdp_config",), "fsdp_")
        strategies.interpret_fsdp(part, draft, nodes)
        parts.append(part)
    elif kind == "DEEPSPEED":
        part = ConfigSection(source, ("deepspeed_config",))
        strategies.interpret_deepspeed(part, draft)
        parts.append(part)
    elif kind in ("NO", "MULTI_CPU", "MULTI_GPU"):
        single = kind == "NO" or processes == 1
        draft.set("parallel.strategy", "single" if single else "ddp", top.place("distributed_type"))
    processes = _read_process_count(top, draft, kind, processes, nodes, sizes)
    device = _read_device(top, draft, kind)
    node_rank, rendezvous = _read_machines(top, draft, nodes)
    gpu_ids = _read_gpu_ids(top)
    _read_left_over(top, draft, kind)
    for part in parts:
        for text in part.problems:
            draft.problem(text, for_script=True)
    return Translation(
        source=source.name,
        distributed_type=kind or str(source.values.get("distributed_type")),
        settings=draft.settings,
        device=device,
        gpu_ids=gpu_ids,
        processes=processes,
        nodes=nodes,
        node_rank=node_rank,
        rendezvous=rendezvous,
        one_of_several=source.one_of_several,
        notes=tuple(draft.notes),
        problems=tuple(dict.fromkeys(draft.problems)),
    )


def find_last_value(overrides: Sequence[str], key: str) -> str | None:
    """Return the last value that ``overrides`` give to a key; None without one."""
    values = [override.partition("=")[2].strip() for override in overrides if override.partition("=")[0] == key]
    return values[-1] if values else None


def _look_up_value(tree: Tree, key: str) -> object:
    section, name = key.split(".")
    values = tree.values.get(section)
    return values.get(name) if isinstance(values, dict) else None


def format_override_value(value: Any) -> str:
    """Return a value in the form of an override, on one line."""
    plain = isinstance(value, str) and value.replace("_", "").isalnum() and value not in ("true", "false", "null")
    return str(value) if plain and not str(value)[0].isdigit() else json.dumps(value)


def _read_kind(top: ConfigSection, draft: Draft) -> str | None:
    environment = top.text("compute_environment")
    if environment is not None and environment.upper() not in ("LOCAL_MACHINE", "1"):
        draft.problem(f"{top.place('compute_environment')}: only LOCAL_MACHINE is supported", for_script=True)
    kind = top.text("distributed_type")
    if kind is None:
        near = "FSDP" if "fsdp_config" in top else "DEEPSPEED" if "deepspeed_config" in top else "MULTI_GPU"
        draft.problem(
            f"{top.source.name}: distributed_type is missing; choose from {', '.join(_DISTRIBUTED)}, here probably "
            f"{near}",
            for_script=True,
        )
        return None
    if kind.upper() in _OTHERS:
        draft.problem(
            f"{top.place('distributed_type')}: not supported: {_OTHERS[kind.upper()]}; choose from "
            f"{', '.join(_DISTRIBUTED)}",
            for_script=True,
        )
        return None
    # No numbers: Accelerate always stores this one as a word.
    if kind.upper() == "FALSE":  # an unquoted NO, read by YAML 1.1 and written out again
        return "NO"
    return top.choice("distributed_type", _DISTRIBUTED)


def _read_counts(top: ConfigSection, draft: Draft, kind: str | None) -> tuple[int | None, int]:
    nodes = top.count("num_machines", least=1) or 1
    if top.raw("num_processes") == -1:  # Accelerate's value for: given on the command line
        draft.note("num_processes", "-1 leaves the number to the command line or the recipe")
        return None, nodes
    processes = top.count("num_processes", least=1)
    if kind == "NO":
        if processes not in (None, 1):
            draft.problem(
                f"{top.place('distributed_type')} is one process, but {top.place('num_processes')}; set "
                "distributed_type to MULTI_GPU or MULTI_CPU, or num_processes to 1",
                for_script=True,
            )
        return 1, nodes
    return processes, nodes


def _read_process_count(
    top: ConfigSection,
    draft: Draft,
    kind: str | None,
    processes: int | None,
    nodes: int,
    sizes: _ParallelismSizes | None,
) -> int | None:
    """Return the number of processes, which must match the parallelism sizes, or follows from them if not given."""
    origin = top.place("distributed_type" if kind == "NO" else "num_processes")
    if processes is None and sizes is not None:
        processes, origin = sizes.processes, sizes.origin
    if processes is None:
        if top.raw("num_processes") != -1:
            draft.note("num_processes", "not set: decided by the recipe and this machine")
        return None
    if processes % nodes and kind != "NO":
        over = f"cannot be divided over {top.place('num_machines')} equally; it counts the processes of all of them"
        draft.problem(f"{origin} {over}", for_script=True)
    if kind is not None:
        draft.set("parallel.num_processes", processes, origin)
    strategy = draft.settings.get("parallel.strategy")
    if sizes is not None and strategy is not None:
        _apply_sizes(sizes, strategy.value, processes, origin, draft)
    return processes


# The `parallelism_config`: the number of processes of each kind of parallelism. Accelerate requires the product of the
# sizes to be the number of processes, and a missing size is 1; if all are 1 they say nothing (parallelism_config.py of
# its 1.15 release).
_SIZES_PREFIX = "parallelism_config_"
_DATA_SIZES = ("dp_replicate_size", "dp_shard_size")
_OTHER_SIZES = {"tp_size": "tensor parallelism", "cp_size": "context parallelism", "sp_size": "sequence parallelism"}
_HOW = ("cp_backend", "cp_comm_strategy", "cp_handler", "tp_handler", "sp_handler")
_HOW_SEQUENCE = ("sp_backend", "sp_seq_length", "sp_seq_length_is_variable", "sp_attn_implementation")
_SIZES_KEYS = tuple(_SIZES_PREFIX + name for name in (*_DATA_SIZES, *_OTHER_SIZES, *_HOW, *_HOW_SEQUENCE))


@dataclass(frozen=True)
class _ParallelismSizes:
    """``replicas`` of the model, each over ``shards`` processes; ``origin``: the keys that set them."""

    replicas: int
    shards: int
    origin: str

    @property
    def processes(self) -> int:
        """Return the number of processes, the product of the sizes."""
        return self.replicas * self.shards


def _read_sizes(part: ConfigSection, draft: Draft) -> _ParallelismSizes | None:
    """Return the sizes of data parallelism; None if the part sets none. Other kinds are reported to ``draft``."""
    sizes = {name: part.count(_SIZES_PREFIX + name, least=1) for name in (*_DATA_SIZES, *_OTHER_SIZES)}
    for name, kind in _OTHER_SIZES.items():
        if (sizes[name] or 1) > 1:
            draft.problem(f"{part.place(_SIZES_PREFIX + name)}: {kind} is not supported; set it to 1")
    for name in (*_HOW, *_HOW_SEQUENCE):
        if _SIZES_PREFIX + name in part and part.source.stated:
            draft.note(_SIZES_PREFIX + name, "for context, tensor and sequence parallelism only")
        part.raw(_SIZES_PREFIX + name)
    for text in part.unknown(_SIZES_KEYS, {}):
        draft.problem(text, for_script=True)
    replicas, shards = (sizes[name] or 1 for name in _DATA_SIZES)
    if replicas * shards == 1:
        return None
    names = [name for name in _DATA_SIZES if _SIZES_PREFIX + name in part]
    return _ParallelismSizes(replicas, shards, " and ".join(part.place(_SIZES_PREFIX + name) for name in names))


def _apply_sizes(sizes: _ParallelismSizes, strategy: str, processes: int, origin: str, draft: Draft) -> None:
    """Apply ``sizes`` to a strategy on ``processes`` processes; ``origin`` is the file's statement of their number.

    Sizes that do not fit are added to the draft's problems.
    """
    spec = look_up_strategy(strategy)
    if sizes.processes != processes:
        is_divisible = processes // sizes.replicas * sizes.replicas == processes
        fix = f"set dp_shard_size: {processes // sizes.replicas}" if is_divisible else "change one of them"
        draft.problem(
            f"{sizes.origin}: dp_replicate_size {sizes.replicas} x dp_shard_size {sizes.shards} needs "
            f"{sizes.processes} processes, but {origin}; {fix}"
        )
    elif "replicate_size" in spec.keys and sizes.shards == 1:
        draft.problem(
            f"{sizes.origin}: {sizes.replicas} replicas on the same number of processes do not shard anything, which "
            "is ddp; set distributed_type: MULTI_GPU (on a CPU MULTI_CPU), or fewer replicas and a dp_shard_size"
        )
    elif "replicate_size" in spec.keys:
        draft.set("parallel.replicate_size", sizes.replicas, sizes.origin)
    elif spec.shards:
        draft.problem(f"{sizes.origin}: ZeRO shards over all processes; these sizes are for distributed_type: FSDP")
    elif sizes.shards > 1:
        draft.problem(f"{sizes.origin}: {strategy} has the full model in every process; use FSDP to shard it")


def _read_precision(top: ConfigSection, draft: Draft) -> None:
    if top.raw("mixed_precision") is False:  # an unquoted `no`, read by YAML 1.1 and written out again
        draft.set("train.mixed_precision", "no", top.place("mixed_precision"))
        return
    name = top.choice("mixed_precision", _PRECISIONS)
    if name == "FP8":
        _read_float8(top, draft)
    elif name is not None:
        draft.set("train.mixed_precision", name.lower(), top.place("mixed_precision"))
    elif top.flag("fp16"):
        draft.set("train.mixed_precision", "fp16", top.place("fp16"))
    top.raw("fp16")  # the key that Accelerate wrote before mixed_precision


def _read_float8(top: ConfigSection, draft: Draft) -> None:
    part = ConfigSection(top.source, ("fp8_config",), "fp8_")
    backend, blocks = (part.text("fp8_backend") or "").upper(), part.flag("fp8_use_mxfp8_block_scaling")
    if backend not in ("AO", "TE") or (backend == "TE" and not blocks):
        draft.problem(
            f"{top.place('mixed_precision')} is supported with backend AO in fp8_config, or TE and "
            "use_mxfp8_block_scaling; the nearest is bf16"
        )
        return
    draft.set("train.mixed_precision", "bf16", top.place("mixed_precision"))
    draft.set("train.float8", "mxfp8" if backend == "TE" else "tensorwise", part.place("fp8_backend"))
    used_keys = ("fp8_backend", "fp8_use_mxfp8_block_scaling") if backend == "TE" else ("fp8_backend",)
    if backend == "TE":
        draft.note(part.place("fp8_use_mxfp8_block_scaling"), "gradients of weights are products in bf16")
    for key in part.given():
        is_e4m3 = key == "fp8_format" and str(part.raw(key)).upper() == "E4M3"  # what mxfp8 rounds all to
        if key not in used_keys and not is_e4m3 and _is_on(part.raw(key)):
            draft.note(part.place(key), "not supported")
    for text in part.problems:
        draft.problem(text)


def _read_compile(top: ConfigSection, draft: Draft) -> None:
    part = ConfigSection(top.source, ("dynamo_config",), "dynamo_")
    section = part if "dynamo_backend" in part else top
    backend = section.text("dynamo_backend")
    top.raw("dynamo_backend")
    if backend is not None and backend.upper() == "INDUCTOR":
        draft.set("train.compile", True, section.place("dynamo_backend"))
    elif backend is not None and backend.upper() not in ("NO", "FALSE"):
        draft.problem(f"{section.place('dynamo_backend')}: only torch's inductor is supported")
    for key in part.given():
        part.raw(key)
        value = part.text(key)
        if key != "dynamo_backend" and value not in (None, "default") and value.lower() != "false":
            draft.note(key, "blocks are compiled one by one with torch's own settings")
    for text in part.problems:
        draft.problem(text)


def _read_device(top: ConfigSection, draft: Draft, kind: str | None) -> Device:
    use_cpu = top.flag("use_cpu")
    if kind == "MULTI_GPU" and use_cpu:
        draft.problem(
            f"{top.place('distributed_type')} contradicts {top.place('use_cpu')}; set MULTI_CPU, or use_cpu: false",
            for_script=True,
        )
    if kind == "MULTI_CPU" or use_cpu:
        return "cpu"
    if kind in ("MULTI_GPU", "FSDP", "DEEPSPEED") and top.source.device_stated:
        return "cuda"
    return "any"


def _read_machines(top: ConfigSection, draft: Draft, nodes: int) -> tuple[int, str | None]:
    rank = top.count("machine_rank") or 0
    host, port = top.text("main_process_ip"), top.count("main_process_port")
    if rank >= nodes:
        draft.problem(
            f"{top.place('machine_rank')}: machines are counted from 0, so with num_machines: {nodes} "
            f"the last is {nodes - 1}",
            for_script=True,
        )
    if nodes == 1:
        if port:
            draft.note("main_process_port", "on one machine, a free port is chosen")
        return rank, None
    backend = top.text("rdzv_backend")
    if backend is not None and backend.lower() not in ("static", "c10d"):
        draft.note("rdzv_backend", "machines use torch's c10d rendezvous")
    return rank, None if host is None else format_address(host, port or DEFAULT_PORT)


def _read_gpu_ids(top: ConfigSection) -> str | None:
    ids = top.names("gpu_ids")
    return None if not ids or ids == ["all"] else ",".join(ids)


def _read_left_over(top: ConfigSection, draft: Draft, kind: str | None) -> None:
    for key in ("rdzv_backend", "same_network", "main_process_ip", *_PARTS):
        top.raw(key)
    if "gradient_accumulation_steps" in top and top.text("gradient_accumulation_steps") != "auto":
        steps = top.count("gradient_accumulation_steps", least=1)
        draft.set("train.gradient_accumulation_steps", steps, top.place("gradient_accumulation_steps"))
    if top.flag("downcast_bf16"):
        draft.note("downcast_bf16", "for TPUs only")
    if top.flag("debug"):
        draft.note("debug", "ranks are always compared before the first step, and if they enter different collectives")
    if top.flag("enable_cpu_affinity"):
        draft.note("enable_cpu_affinity", "processes are bound to the cores of their GPU's NUMA node in any case")
    if (top.text("main_training_function") or "main") != "main":
        draft.note("main_training_function", "for TPUs only")
    tpu = [key for key in _TPU_KEYS if _is_on(top.raw(key))]
    if tpu or _is_on(top.raw("command_file")):
        draft.note(", ".join(tpu or ["command_file"]), "for TPUs only")
    used_section = {"FSDP": "fsdp_config", "DEEPSPEED": "deepspeed_config"}.get(kind or "")
    for name in ("fsdp_config", "deepspeed_config", "megatron_lm_config"):
        if name in top and name != used_section and kind is not None:
            draft.note(name, f"ignored with distributed_type {kind}")
    for name in ("ipex_config", "fp8_config", "tp_config"):
        used_here = name == "fp8_config" and "train.float8" in draft.settings
        if name in top and any(map(_is_on, _list_items(top.raw(name)))) and not used_here:
            draft.note(name, "not supported")
    if "mpirun_config" in top and any(map(_is_on, _list_items(top.raw("mpirun_config")))):
        draft.note("mpirun_config", "processes are started without MPI; on several machines, start the command on each")
    supported_keys = (*_PLAIN_KEYS, *_PARTS, *_TPU_KEYS)
    elsewhere = dict.fromkeys(strategies.DEEPSPEED_KEYS, "deepspeed_config") | dict.fromkeys(
        strategies.FSDP_KEYS, "fsdp_config"
    )
    for text in top.unknown(supported_keys, elsewhere):
        draft.problem(text, for_script=True)


def _list_items(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else [value]


def _is_on(value: Any) -> bool:
    return value not in (None, False, "", [], {}) and str(value).lower() not in ("false", "no", "[]", "none")


def build_rendezvous_error(translation: Translation) -> RequestError | None:
    """Return the error for several machines without a rendezvous address, or None."""
    if translation.nodes == 1 or translation.rendezvous is not None:
        return None
    return RequestError(
        f"{translation.source}: num_machines is {translation.nodes}, but main_process_ip is missing: set it to the "
        f"address of the first machine, or pass --rendezvous host:{DEFAULT_PORT}"
    )
