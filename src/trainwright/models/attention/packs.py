"""Attention within each sequence of a flat pack, as an attention implementation for ``transformers``.

With the implementation ``PACKED``, a model passes queries, keys and values of a whole pack with the sequence
boundaries (``cu_seq_lens_q``) and the host's copy of them (``sequences``). Tokens do not attend to other sequences, and
no mask over the pack is created. ``kernels.choose`` decides which kernel computes a layer.

A window of transformers includes the current token;
that of flash attention counts the tokens before it.

flex_attention computes blocks of allowed pairs only (arXiv 2412.05496). Outside of compiled code it has to be compiled
by itself: uncompiled it creates all scores (torch/nn/attention/flex_attention.py). It has no dropout: scores can be
changed before the softmax, weights not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import torch

from trainwright.machine.vendors import Vendor
from trainwright.models.attention import plain
from trainwright.models.attention.kernels import (
    CPU,
    AttentionKernel,
    AttentionNeeds,
    Dtype,
    Platform,
    choose,
    list_missing_kernels,
)
from trainwright.models.attention.plain import flash_cpu
from trainwright.models.attention.sequences import Call, Sequences
from trainwright.recipe.extensions import load

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


PACKED = "trainwright_packed"
DTYPES: Mapping[torch.dtype, Dtype] = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


class UnpackableError(ValueError):
    """The architecture cannot be trained on packs."""


def register(attention: str = "auto") -> str:
    """Register the attention of packs with transformers; return its name for a value of ``model.attention``.

    It gets no mask function: without one transformers makes no mask (``_preprocess_mask_arguments`` in
    masking_utils.py); with one, it first looks for packs in the positions, for which the host waits for the GPU.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    name = PACKED if attention == "auto" else re.sub(r"\W", "_", f"{PACKED}_{attention}")
    ALL_ATTENTION_FUNCTIONS.register(name, partial(packed_attention, attention=attention))
    return name


class PackArguments(TypedDict, total=False):
    """What transformers passes to an attention implementation, and what packs add to it; others are ignored.

    ``cu_seq_lens_q``: boundaries of the sequences on the device. ``sequences``: the same on the host; without it, a
    GPU's kernels that need it read the boundaries.
    """

    cu_seq_lens_q: torch.Tensor | None
    max_length_q: int | None
    sequences: Sequences | None
    dropout: float
    scaling: float | None
    sliding_window: int | None
    softcap: float | None
    s_aux: torch.Tensor | None
    is_causal: bool | None
    position_bias: torch.Tensor | None


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    attention: str = "auto",
    **arguments: Unpack[PackArguments],
) -> tuple[torch.Tensor, None]:
    """Compute causal attention of ``query`` [1, H, T, D] with ``key``, ``value`` [1, Hkv, T, D] within each sequence.

    Args:
        attention: the value of ``model.attention``.

    Returns:
        ``(output [1, T, H, D], None)``, as required by transformers.
    """
    call, sequences = call_of(module, query, key, value, arguments)
    kernel, compute = _functions[_choose_kernel_name(call, attention)]
    padded_call = call.padded(*kernel.widths(query.shape[-1], value.shape[-1]))
    # Contiguous, as transformers' own implementations return it: some models view it.
    return call.cut(compute(padded_call, sequences)).contiguous(), None


def call_of(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, arguments: PackArguments
) -> tuple[Call, Sequences | None]:
    """Return what a kernel gets of the arguments of ``packed_attention``.

    Raises:
        UnpackableError: the architecture cannot be trained on packs.
    """
    cu_seq_lens_q, max_length_q = arguments.get("cu_seq_lens_q"), arguments.get("max_length_q")
    if cu_seq_lens_q is None or max_length_q is None:
        raise UnpackableError(f"{type(module).__name__} does not know where packed sequences begin")
    if arguments.get("position_bias") is not None or arguments.get("is_causal") is False:
        raise UnpackableError(f"{type(module).__name__} needs an attention that packed training does not have")
    chunk, sequences = _find_chunk_size(module), arguments.get("sequences")
    if chunk is not None and chunk < max_length_q:
        sequences = _bring_to_host(sequences, cu_seq_lens_q, max_length_q).in_chunks(chunk)
        cu_seq_lens_q, max_length_q = sequences.boundaries, chunk
    scaling, window = arguments.get("scaling"), arguments.get("sliding_window")
    call = Call(
        query,
        key,
        value,
        cu_seq_lens_q,
        max_length_q,
        scaling if scaling is not None else query.shape[-1] ** -0.5,
        window if window is not None and window < max_length_q else None,
        arguments.get("dropout", 0.0),
        arguments.get("softcap"),
        arguments.get("s_aux"),
    )
    return call, sequences


def _choose_kernel_name(call: Call, attention: str) -> str:
    query = call.query
    # A branch, as torch.compile takes bool() of a module's number for one that may change.
    has_dropout = True if call.dropout else False  # noqa: SIM210
    flags = call.softcap is not None, call.sinks is not None, has_dropout, call.window is not None
    sizes = query.shape[-1], call.value.shape[-1]
    return choose_kernel_name(query.device.type, query.device.index, query.dtype, *sizes, flags, attention)


def choose_kernel_name(
    device: str,
    index: int | None,
    dtype: torch.dtype,
    size: int,
    value_size: int,
    flags: tuple[bool, bool, bool, bool],
    attention: str = "auto",
) -> str:
    """Return the name of the kernel that computes a layer. Arguments are constants, so compiled code has it as one.

    Args:
        flags: whether there are soft caps, sinks, dropout and a window.
        attention: of the recipe.
    """
    deterministic = torch.are_deterministic_algorithms_enabled()
    key = device, index, dtype, size, value_size, flags, deterministic, attention
    if key not in _chosen:
        softcap, sinks, dropout, window = flags
        needs = AttentionNeeds(
            size,
            value_size,
            DTYPES.get(dtype, "fp32"),
            softcap=softcap,
            sinks=sinks,
            dropout=dropout,
            window=window,
            deterministic=deterministic,
        )
        kernel = choose(needs, build_platform(device, index or 0, attention)).kernel
        assert kernel.implementation is not None, "a kernel of packs"
        _functions[kernel.name] = kernel, load(kernel.implementation, f"attention kernel {kernel.name}")
        _chosen[key] = kernel.name
    return _chosen[key]


_chosen: dict[Any, str] = {}
# Of each chosen kernel; see ``AttentionKernel.implementation``.
_functions: dict[str, tuple[AttentionKernel, Callable[[Call, Sequences | None], torch.Tensor]]] = {}


def build_platform(device: str, index: int = 0, attention: str = "auto") -> Platform:
    """Return a device as attention kernels see it, with the installed software and ``model.attention``."""
    if device == "cpu":
        return replace(CPU, attention=attention)
    if device == "xpu":
        return Platform("Intel", (0, 0), list_missing_kernels(), attention)
    vendor: Vendor = "NVIDIA" if torch.version.hip is None else "AMD"
    return Platform(vendor, torch.cuda.get_device_capability(index), list_missing_kernels(), attention)


def _find_chunk_size(module: torch.nn.Module) -> int | None:
    """Return the chunk size of a layer of Llama 4, whose chunks of a sequence do not attend to each other, or None."""
    config: Any = getattr(module, "config", None)
    size: int | None = getattr(config, "attention_chunk_size", None)
    kinds, layer = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    return size if kinds is not None and layer is not None and kinds[layer] == "chunked_attention" else None


def _bring_to_host(sequences: Sequences | None, boundaries: torch.Tensor, longest: int) -> Sequences:
    """Return the sequences; if only the device knows them, the host waits for a GPU here."""
    return Sequences(boundaries.cpu(), longest, boundaries.device) if sequences is None else sequences


def attend_by_cpu_flash(call: Call, sequences: Sequences | None) -> torch.Tensor:
    """Run torch's flash attention for CPUs on each sequence."""
    # A backward pass in fp32 of a forward pass in bf16 needs a custom operator.
    if call.query.dtype == torch.float32 and plain.are_equal(call):
        return plain.attend_equal_sequences(call)
    inputs = call.query, call.key, call.value
    return flash_cpu(*inputs, call.boundaries, call.scale)[0].transpose(1, 2)


def attend_by_sequence(call: Call, sequences: Sequences | None) -> torch.Tensor:
    """Run torch's SDPA or plain operations on each sequence."""
    # On a CPU torch stores the scores of all sequences at once if values have another head size than keys.
    stores_scores = call.query.is_cpu and call.value.shape[-1] != call.key.shape[-1]
    if call.is_plain and plain.are_equal(call) and not stores_scores:
        return plain.attend_equal_sequences(call)
    return plain.attend_each_sequence(call, sequences)


def flex(call: Call, sequences: Sequences | None) -> torch.Tensor:
    """Run flex_attention."""
    return attend(call, _bring_to_host(sequences, call.boundaries, call.longest).block_mask(call.window))


def varlen(call: Call, sequences: Sequences | None) -> torch.Tensor:
    """Run torch's flash attention. It is deterministic while torch.use_deterministic_algorithms is on."""
    from torch.nn.attention.varlen import varlen_attn

    window = (_count_tokens_before(call), 0)
    output = varlen_attn(*_build_varlen_arguments(call), scale=call.scale, window_size=window, enable_gqa=call.grouped)
    assert isinstance(output, torch.Tensor)
    return output.unsqueeze(0)


def flash_attn_4(call: Call, sequences: Sequences | None) -> torch.Tensor:
    """Run FlashAttention-4, by torch's switch, which replaces the kernels of its flash attention in the whole process.

    So other layers of the process can have no heads that it does not compute; torch raises an error for them.
    """
    switch_to("FA4")
    return varlen(call, sequences)


_switched: set[str] = set()


def switch_to(name: str) -> None:
    """Activate an implementation of torch's flash attention, once. Compiled code has done so when it was compiled."""
    from torch.nn.attention import activate_flash_attention_impl

    if name not in _switched:
        activate_flash_attention_impl(name)
        _switched.add(name)


def flash_attn_2(call: Call, sequences: Sequences | None) -> torch.Tensor:
    """Run flash-attn 2."""
    from flash_attn import flash_attn_varlen_func

    return _run_flash_attn(flash_attn_varlen_func, call, dropout_p=call.dropout)


def flash_attn_3(call: Call, sequences: Sequences | None) -> torch.Tensor:
    """Run FlashAttention-3."""
    from flash_attn_interface import flash_attn_varlen_func

    return _run_flash_attn(flash_attn_varlen_func, call)


def _run_flash_attn(compute: Callable[..., Any], call: Call, **options: Any) -> torch.Tensor:
    result = compute(
        *_build_varlen_arguments(call),
        softmax_scale=call.scale,
        causal=True,
        window_size=(_count_tokens_before(call), 0),
        softcap=call.softcap or 0.0,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        **options,
    )
    output: torch.Tensor = result[0] if isinstance(result, tuple) else result  # some return the log-sum-exp with it
    return output.unsqueeze(0)


def _build_varlen_arguments(call: Call) -> tuple[Any, ...]:
    """Return queries, keys, values, and boundaries and the greatest length for queries and for keys."""
    return *call.flat(), call.boundaries, call.boundaries, call.longest, call.longest


def _count_tokens_before(call: Call) -> int:
    """Return how many tokens before itself a token attends to; -1: all of its sequence."""
    return -1 if call.window is None else call.window - 1


def attend(call: Call, mask: BlockMask) -> torch.Tensor:
    """Compute attention with the allowed pairs of ``mask``; return [1, T, H, V]."""
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    run: Any = flex_attention if torch.compiler.is_compiling() else compile_flex_attention()
    options: dict[str, Any] = {"block_mask": mask, "scale": call.scale, "enable_gqa": call.grouped}
    if call.softcap is not None:
        options["score_mod"] = _build_softcap(call.softcap)
    if call.sinks is None:
        output = run(call.query, call.key, call.value, **options)
    else:
        output, more = run(call.query, call.key, call.value, return_aux=AuxRequest(lse=True), **options)
        # A sink adds its exponential to the sum that the exponentials of all scores are divided by.
        share = torch.sigmoid(more.lse - call.sinks.float().view(1, -1, 1))
        output = output * share.unsqueeze(-1).to(output.dtype)
    return output.transpose(1, 2)


@cache
def compile_flex_attention() -> Callable[..., Any]:
    """Return flex_attention compiled; from a second length of packs on, for any length."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)  # without dynamic=True, so that scales and soft caps stay constants


def _build_softcap(softcap: float) -> Callable[..., torch.Tensor]:
    def capped(
        score: torch.Tensor, b: torch.Tensor, h: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        return softcap * torch.tanh(score / softcap)

    return capped
