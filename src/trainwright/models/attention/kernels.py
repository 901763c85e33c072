"""The attention kernels, their limits, and the choice among them. Imports no torch, so that plans use it too.

``choose`` returns the first of ``list_kernels()`` that can compute a layer's attention on a device, with the reasons
why the faster ones before it cannot. The limits are those that the kernels check themselves:

- flash attention of torch 2.13, through ``torch.nn.attention.varlen.varlen_attn``: mha_varlen_fwd and mha_varlen_bwd in
  aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, and can_use_flash_attention in ../sdp_utils.cpp.
  ``varlen_attn`` has neither dropout nor soft caps, and its backward pass ignores the gradient of the log-sum-exp, from
  which sinks could be computed;
- flash-attn 2.8: csrc/flash_attn/flash_api.cpp of github.com/Dao-AILab/flash-attention;
- FlashAttention-3: hopper/flash_api.cpp of the same repository;
- FlashAttention-4: flash_attn/cute/interface.py there (_validate_head_dims), and torch/nn/attention/_fa4.py, through
  which torch's varlen attention reaches it. Its backward pass on Hopper has no fixed order, and FlashAttention-3
  is as fast there;
- the fused kernels of scaled_dot_product_attention: can_use_mem_efficient_attention in sdp_utils.cpp;
- flex_attention (arXiv 2412.05496): Triton code without dropout, for heads of at least 16 channels
  (torch/_inductor/kernel/flex/flex_attention.py), ten times slower than other kernels on capability 7.0
  (github.com/meta-pytorch/attention-gym/issues/21).

Flash attention adds gradients of queries in no fixed order, unless it is asked for a deterministic backward pass
(github.com/Dao-AILab/flash-attention/issues/414 and 988).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from trainwright.errors import RequestError
from trainwright.machine.processor import explain_no_triton
from trainwright.machine.vendors import VENDORS, Vendor
from trainwright.recipe.registries import ATTENTION_KERNELS

Dtype = Literal["fp32", "bf16", "fp16"]
Capability = tuple[int, int]

_HALVES: frozenset[Dtype] = frozenset({"bf16", "fp16"})
_ALL: frozenset[Dtype] = frozenset({"fp32", "bf16", "fp16"})


@dataclass(frozen=True)
class Platform:
    """A device that attention runs on.

    ``missing``: kernels that its software lacks, each with the reason. ``attention``: of the recipe's
    model.
    """

    vendor: Vendor = "NVIDIA"
    capability: Capability = (8, 0)
    missing: tuple[tuple[str, str], ...] = ()
    attention: str = "auto"


CPU = Platform("CPU", (0, 0))


@dataclass(frozen=True)
class AttentionNeeds:
    """What a layer's attention has to compute.

    ``packed``: within the sequences of a pack; otherwise over padded rows. ``size``, ``value_size``: widths of a head's
    queries and keys, and of its values. ``sinks``: each head has a score that belongs to no value. ``window``: some
    sequences are longer than the layer's window. ``bias``: numbers are added to the scores, as by ALiBi.
    ``deterministic``: the backward pass has to give the same bits every time.
    """

    size: int
    value_size: int
    dtype: Dtype
    packed: bool = True
    softcap: bool = False
    sinks: bool = False
    dropout: bool = False
    window: bool = False
    bias: bool = False
    deterministic: bool = False


@dataclass(frozen=True)
class Gap:
    """Widths of heads, first and last, that a kernel cannot train on NVIDIA's GPUs from one capability to another.

    ``dropout``: only with dropout.
    """

    sizes: tuple[int, int]
    capabilities: tuple[Capability, Capability]
    dropout: bool = False


@dataclass(frozen=True)
class AttentionKernel:
    """An attention kernel and its limits.

    ``implementation``: ``module:name`` of its function, which takes a ``call.Call`` with padded heads and the
    ``sequences.Sequences``, if the host knows them, and returns [1, T, H, V]; None: transformers' own of that name.
    ``memory``: how much memory it takes. "flash": a number for each query; "sequences": the same, sequence by sequence;
    "scores": all scores of a sequence. ``vendors``: of devices. ``min_capability``, ``max_capability``: of NVIDIA's.
    ``least_bf16``: the one from which it computes in bf16. ``multiple``: heads are padded with zeros to a
    multiple of it, which changes no result. ``values``: their width: "any"; "padded": made as wide as keys
    with zeros; "equal": only as wide as keys. ``largest``: width of a padded head. ``gaps``: widths that fail.
    ``features``: fields of ``AttentionNeeds`` that it can compute. ``apart``: pairs that it cannot compute together.
    ``before``: the kernel that it is faster than, if it is of another package; None: it is the slowest.
    ``always_deterministic``: also without asking. ``largest_deterministic``: width of a padded head. ``generation``: of
    FlashAttention, for the time.
    """

    name: str
    title: str
    packed: bool
    memory: Literal["flash", "sequences", "scores"]
    vendors: frozenset[Vendor]
    implementation: str | None = None
    before: str | None = None
    dtypes: frozenset[Dtype] = _ALL
    min_capability: Capability = (0, 0)
    max_capability: Capability | None = None
    least_bf16: Capability = (0, 0)
    multiple: int = 1
    values: Literal["any", "padded", "equal"] = "any"
    largest: int | None = None
    gaps: tuple[Gap, ...] = ()
    features: frozenset[str] = frozenset()
    apart: tuple[tuple[str, str], ...] = ()
    always_deterministic: bool = False
    largest_deterministic: int | None = None
    generation: Literal[2, 3, 4] = 2

    def widths(self, size: int, value_size: int) -> tuple[int, int]:
        """Return the widths of a head's keys and of its values after padding with zeros."""
        if self.values == "padded":
            size = value_size = max(size, value_size)
        return -(-size // self.multiple) * self.multiple, -(-value_size // self.multiple) * self.multiple


_GPU: frozenset[Vendor] = frozenset(vendor.name for vendor in VENDORS.values())
_CUDA_OR_ROCM: frozenset[Vendor] = frozenset({"NVIDIA", "AMD"})
_NVIDIA: frozenset[Vendor] = frozenset({"NVIDIA"})
_ONLY_CPU: frozenset[Vendor] = frozenset({"CPU"})
_EVERYWHERE: frozenset[Vendor] = _GPU | _ONLY_CPU
_EVERYTHING = frozenset({"softcap", "sinks", "dropout", "window"})
# check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120 in sdp_utils.cpp.
_CONSUMER_GAPS = (Gap((193, 224), ((8, 6), (8, 9))), Gap((193, 224), ((12, 0), (12, 1))))
# run_mha_bwd_hdim256 in csrc/flash_attn/src/flash_bwd_launch_template.h: dropout does not fit into shared memory.
_DROPOUT_GAPS = (Gap((225, 256), ((8, 6), (8, 9)), dropout=True), Gap((225, 256), ((12, 0), (12, 1)), dropout=True))

FLASH_ATTN_4 = AttentionKernel(
    name="flash_attn_4",
    title="FlashAttention-4",
    packed=True,
    memory="flash",
    vendors=_NVIDIA,
    implementation="trainwright.models.attention.packs:flash_attn_4",
    dtypes=_HALVES,
    min_capability=(10, 0),
    max_capability=(10, 3),
    multiple=8,
    values="padded",
    largest=128,
    features=frozenset({"window"}),
    generation=4,
)
FLASH_ATTN_3 = AttentionKernel(
    name="flash_attn_3",
    title="FlashAttention-3",
    packed=True,
    memory="flash",
    vendors=_NVIDIA,
    implementation="trainwright.models.attention.packs:flash_attn_3",
    dtypes=_HALVES,
    min_capability=(9, 0),
    max_capability=(9, 0),
    multiple=8,
    values="padded",
    largest=256,
    features=frozenset({"softcap", "window"}),
    largest_deterministic=192,
    generation=3,
)
VARLEN = AttentionKernel(
    name="varlen",
    title="torch's varlen flash attention",
    packed=True,
    memory="flash",
    vendors=_CUDA_OR_ROCM,
    implementation="trainwright.models.attention.packs:varlen",
    dtypes=_HALVES,
    min_capability=(8, 0),
    multiple=8,
    values="padded",
    largest=256,
    gaps=_CONSUMER_GAPS,
    features=frozenset({"window"}),
)
FLASH_ATTN = AttentionKernel(
    name="flash_attn",
    title="flash-attn 2",
    packed=True,
    memory="flash",
    vendors=_NVIDIA,
    implementation="trainwright.models.attention.packs:flash_attn_2",
    dtypes=_HALVES,
    min_capability=(8, 0),
    multiple=8,
    values="padded",
    largest=256,
    gaps=(*_CONSUMER_GAPS, *_DROPOUT_GAPS),
    features=frozenset({"softcap", "dropout", "window"}),
    apart=(("softcap", "dropout"),),
)
SDPA_EACH = AttentionKernel(
    name="sdpa_each",
    title="torch's SDPA, sequence by sequence",
    packed=True,
    memory="sequences",
    vendors=_GPU,
    implementation="trainwright.models.attention.packs:attend_by_sequence",
    min_capability=(5, 0),
    least_bf16=(8, 0),
    multiple=8,
    features=frozenset({"dropout"}),
)
FLEX = AttentionKernel(
    name="flex",
    title="torch's flex_attention",
    packed=True,
    memory="flash",
    vendors=_NVIDIA,
    implementation="trainwright.models.attention.packs:flex",
    min_capability=(8, 0),
    multiple=16,
    largest=256,
    features=frozenset({"softcap", "sinks", "window"}),
    always_deterministic=True,
)
CPU_FLASH = AttentionKernel(
    name="cpu_flash",
    title="torch's flash attention for CPUs, sequence by sequence",
    packed=True,
    memory="sequences",
    vendors=_ONLY_CPU,
    implementation="trainwright.models.attention.packs:attend_by_cpu_flash",
    values="equal",
    always_deterministic=True,
)
SCORES = AttentionKernel(
    name="scores",
    title="plain operations, sequence by sequence",
    packed=True,
    memory="scores",
    vendors=_EVERYWHERE,
    implementation="trainwright.models.attention.packs:attend_by_sequence",
    features=_EVERYTHING,
)
SDPA = AttentionKernel(
    name="sdpa",
    title="torch's SDPA",
    packed=False,
    memory="flash",
    vendors=_EVERYWHERE,
    features=frozenset({"dropout", "window", "bias"}),
)
EAGER = AttentionKernel(
    name="eager",
    title="plain operations",
    packed=False,
    memory="scores",
    vendors=_EVERYWHERE,
    features=_EVERYTHING | {"bias"},
    always_deterministic=True,
)

# The kernels of values of model.attention that are not the name of one.
_GROUPS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "eager": frozenset({"scores", "eager"}),
        "sdpa": frozenset({"sdpa_each", "cpu_flash", "sdpa"}),
        "flash_attention_2": frozenset({"flash_attn", "varlen"}),
        "flash_attention_3": frozenset({"flash_attn_3"}),
        "flash_attention_4": frozenset({"flash_attn_4"}),
    }
)

_UNORDERED = (
    "its backward pass adds in no fixed order, so repeated runs are equal up to rounding; "
    "train.deterministic: true makes them bit-identical"
)
_WORDS: Mapping[str, str] = MappingProxyType(
    {"softcap": "soft caps", "sinks": "sinks", "dropout": "dropout", "window": "sliding windows", "bias": "biases"}
)


@dataclass(frozen=True)
class Chosen:
    """The chosen kernel. ``refused``: the title of each faster one, and why it was not taken."""

    kernel: AttentionKernel
    refused: tuple[tuple[str, str], ...]

    def words(self) -> str:
        """Return the kernel and the reasons against the faster ones in one line."""
        reasons = "; ".join(f"{title}: {why}" for title, why in self.refused)
        return self.kernel.title + (f" ({reasons})" if reasons else "")

    def line(self, needs: AttentionNeeds, platform: Platform) -> str:
        """Return the kernel in words, for which rows it is, and whether repeated runs are bit-identical."""
        rows = "" if needs.packed else ", over padded rows"
        longer = ", for sequences longer than the window" if needs.window and needs.packed else ""
        deterministic = platform.vendor == "CPU" or self.kernel.always_deterministic or needs.deterministic
        return self.words() + rows + longer + ("" if deterministic else f"; {_UNORDERED}")


@cache
def list_kernels() -> tuple[AttentionKernel, ...]:
    """Return the registered kernels: for each kind of rows and device, the fastest first."""
    ordered_kernels: list[AttentionKernel] = []
    for kernel in map(ATTENTION_KERNELS.get, ATTENTION_KERNELS.names()):
        names = [ordered_kernel.name for ordered_kernel in ordered_kernels]
        ordered_kernels.insert(names.index(kernel.before) if kernel.before in names else len(names), kernel)
    return tuple(ordered_kernels)


def select_kernels(attention: str) -> tuple[AttentionKernel, ...]:
    """Return the kernels of a value of ``model.attention``."""
    if attention == "auto":
        return list_kernels()
    if attention not in _GROUPS:
        return (ATTENTION_KERNELS.get(attention),)
    return tuple(kernel for kernel in list_kernels() if kernel.name in _GROUPS[attention])


def choose(needs: AttentionNeeds, platform: Platform) -> Chosen:
    """Return the fastest kernel that computes ``needs`` on ``platform``, and why not a faster one.

    Raises:
        RequestError: none of the kernels of ``model.attention`` can.
        ValueError: there is none: biases within the sequences of a pack.
    """
    refusals: list[tuple[str, str]] = []
    requested_kernels = select_kernels(platform.attention)
    for kernel in dict.fromkeys((*list_kernels(), *requested_kernels)):
        why = _find_reason_against(kernel, needs, platform)
        if kernel not in requested_kernels:
            why = f"model.attention is {platform.attention}"
        if why is None:
            return Chosen(kernel, tuple(refusals))
        if kernel.packed == needs.packed and platform.vendor in kernel.vendors:
            refusals.append((kernel.title, why))
    if platform.attention != "auto":
        raise RequestError(_explain_impossible(needs, platform))
    raise ValueError(f"no attention kernel can compute {needs} on {platform}")


def _explain_impossible(needs: AttentionNeeds, platform: Platform) -> str:
    """Return why no kernel of ``model.attention`` computes ``needs``, and the values that do."""
    requested_kernels = select_kernels(platform.attention)
    against = {
        kernel.name: _find_reason_against(kernel, needs, platform) for kernel in (*list_kernels(), *requested_kernels)
    }
    groups = {**_GROUPS, "flex": {"flex"}}
    possible = [word for word, names in groups.items() if any(against[name] is None for name in names)]
    return (
        f"model.attention: {platform.attention} is not possible here: "
        f"{'; '.join(f'{kernel.title} {against[kernel.name]}' for kernel in requested_kernels)}; set it to "
        f"{' or '.join(['auto', *possible])}"
    )


def _find_reason_against(kernel: AttentionKernel, needs: AttentionNeeds, platform: Platform) -> str | None:
    """Return the first reason why a kernel cannot compute ``needs`` on ``platform``; None if it can."""
    if kernel.packed != needs.packed:
        return "is for packs, see data.pack_length" if kernel.packed else "is for padded rows"
    if platform.vendor not in kernel.vendors:
        return f"does not run on {'a CPU' if platform.vendor == 'CPU' else f'GPUs of {platform.vendor}'}"
    return next(_iterate_reasons_against(kernel, needs, platform), None)


def describe_kernels(layers: Iterable[AttentionNeeds], platform: Platform) -> list[str]:
    """Return a line for each kernel that computes one of ``layers`` on ``platform``, with the reasons."""
    lines: dict[str, str] = {}
    for needs in layers:
        choice = choose(needs, platform)
        lines.setdefault(choice.kernel.name, choice.line(needs, platform))
    return list(lines.values())


def _iterate_reasons_against(kernel: AttentionKernel, needs: AttentionNeeds, platform: Platform) -> Iterator[str]:
    """Yield the reasons why a kernel cannot compute ``needs`` on ``platform``; last, that it is not installed."""
    yield from _iterate_device_reasons(kernel, needs, platform)
    for feature, words in _WORDS.items():
        if getattr(needs, feature) and feature not in kernel.features:
            yield f"has no {words}"
    for first_feature, second_feature in kernel.apart:
        if getattr(needs, first_feature) and getattr(needs, second_feature):
            yield f"has no {_WORDS[first_feature]} together with {_WORDS[second_feature]}"
    yield from _iterate_size_reasons(kernel, needs, platform)
    if (missing := dict(platform.missing).get(kernel.name)) is not None:
        yield missing


def _iterate_device_reasons(kernel: AttentionKernel, needs: AttentionNeeds, platform: Platform) -> Iterator[str]:
    gpu_capability = f"this GPU has {_format_capability(platform.capability)}"
    if platform.vendor == "NVIDIA" and not kernel.min_capability <= platform.capability <= (
        kernel.max_capability or platform.capability
    ):
        last = kernel.max_capability
        upwards = (
            " or higher" if last is None else "" if last == kernel.min_capability else f" to {_format_capability(last)}"
        )
        yield f"needs compute capability {_format_capability(kernel.min_capability)}{upwards}, {gpu_capability}"
    if needs.dtype not in kernel.dtypes:
        yield f"does not compute in {needs.dtype}"
    if needs.dtype == "bf16" and platform.vendor == "NVIDIA" and platform.capability < kernel.least_bf16:
        yield f"needs compute capability {_format_capability(kernel.least_bf16)} or higher for bf16, {gpu_capability}"


def _iterate_size_reasons(kernel: AttentionKernel, needs: AttentionNeeds, platform: Platform) -> Iterator[str]:
    width = max(kernel.widths(needs.size, needs.value_size))
    if kernel.values == "equal" and needs.size != needs.value_size:
        yield f"needs values as wide as keys, these have {needs.value_size} and {needs.size} channels"
    if kernel.largest is not None and width > kernel.largest:
        yield f"needs heads of at most {kernel.largest} channels, these have {width}"
    if needs.deterministic and kernel.largest_deterministic is not None and width > kernel.largest_deterministic:
        yield f"is deterministic for heads of at most {kernel.largest_deterministic} channels, these have {width}"
    for gap in kernel.gaps if platform.vendor == "NVIDIA" else ():
        applies = gap.capabilities[0] <= platform.capability <= gap.capabilities[1]
        if applies and gap.sizes[0] <= width <= gap.sizes[1] and (needs.dropout or not gap.dropout):
            how = " with dropout" if gap.dropout else ""
            yield (
                f"cannot train heads of {width} channels{how} on compute capability "
                f"{_format_capability(platform.capability)}"
            )


def _format_capability(capability: Capability) -> str:
    return f"{capability[0]}.{capability[1]}"


_SOFT_CAPS = (2, 6)  # version of flash-attn with soft caps and a deterministic backward pass
_ABSENT = "is not installed"
_NOT_ASSUMED = "is not assumed to be installed"
# A machine that is not here is planned with PyTorch and a compiler alone.
ASSUMED = Platform(
    missing=(("flash_attn_4", _NOT_ASSUMED), ("flash_attn_3", _NOT_ASSUMED), ("flash_attn", _NOT_ASSUMED))
)
# The packages of kernels: FlashAttention-3 is among PyTorch's wheels (download.pytorch.org/whl), the other on PyPI.
_INSTALL_3, _INSTALL_4 = "flash-attn-3 of download.pytorch.org/whl", "flash-attn-4"


@cache
def list_missing_kernels() -> tuple[tuple[str, str], ...]:
    """Return the names of kernels for GPUs that cannot be used here, each with the reason."""
    third = None if find_spec("flash_attn_interface") is not None else f"{_ABSENT} ({_INSTALL_3})"
    reasons = {
        "flash_attn_4": None if _has_flash_attn_4() else f"{_ABSENT} ({_INSTALL_4})",
        "flash_attn_3": third,
        "flash_attn": _explain_missing_flash_attn(),
        "flex": explain_no_triton(),
    }
    return tuple((name, why) for name, why in reasons.items() if why is not None)


def _has_flash_attn_4() -> bool:
    """Return whether the package is installed whose module torch's switch imports; without importing its parent."""
    parent = find_spec("flash_attn")
    folders = parent.submodule_search_locations if parent is not None else None
    return any((Path(folder) / "cute" / "interface.py").is_file() for folder in folders or ())


def _explain_missing_flash_attn() -> str | None:
    spec = find_spec("flash_attn")
    if spec is None or spec.origin is None:  # flash-attn-4 alone fills the folder of that name
        return _ABSENT
    try:
        installed_version = version("flash_attn")
    except PackageNotFoundError:
        return "has no version"
    numbers = tuple(int(part) for part in re.findall(r"\d+", installed_version)[:2])
    return None if numbers >= _SOFT_CAPS else f"{installed_version} is older than {'.'.join(map(str, _SOFT_CAPS))}"
