"""Make the modules that a run would train, on tensors without data, and batches for them.

Traces for a GPU run on tensors that say they are on a CPU, with stand-ins for a GPU's kernels.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache, partial
from typing import Any, NamedTuple, Unpack

import torch
from torch import nn

from trainwright.data.stream.batch import Batch
from trainwright.models.adapters.attaching import attach_without_weights
from trainwright.models.adapters.files import list_fully_trained
from trainwright.models.attention.described import needs_of
from trainwright.models.attention.kernels import AttentionNeeds, choose
from trainwright.models.attention.packs import DTYPES, PackArguments, attend_by_sequence, call_of, varlen
from trainwright.models.attention.plain import are_equal
from trainwright.models.causal_lm import CausalLM, RouterLoss, find_blocks
from trainwright.models.configuration import (
    build_config,
    convert_creation_errors,
    drop_ignored,
    list_layer_configs,
    register,
    set_dropout,
)
from trainwright.models.files import has_experts
from trainwright.models.float8 import use_float8
from trainwright.models.fused.choice import Kernels
from trainwright.models.gpt.conversion import convert_config
from trainwright.models.low_rank import join_adapters
from trainwright.models.quantization import iterate_quantized_parameters, quantize
from trainwright.models.recompute import save_activation_memory
from trainwright.parallel.constants import compute_padded_size
from trainwright.planning.trace.request import Device, Regime, Rows, TracedModel, TraceRequest
from trainwright.planning.trace.units import BASIS, BatchShape, LayerAttention, ModelFacts, compute_basis
from trainwright.recipe.sections.model import OWN, AdapterSection
from trainwright.tasks.unlearn.module import UnlearnLM

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_WINDOWS = ("sliding_window", "attention_chunk_size", "attention_window_size", "window_size")
_WINDOW = 48  # of a traced model, if sequences are longer


@dataclass(frozen=True)
class BatchSample:
    """The shape of a traced batch.

    ``lengths``: of its sequences, the longest last. ``chunk``, ``block``: rows of logits that the loss takes at a time;
    ``chunks``, ``blocks``: how often it does. ``pads``: it pads them to a number of ``compute_padded_size``. ``part``:
    tokens that operations in blocks take at a time.
    """

    rows: Rows
    lengths: tuple[int, ...]
    targets: int
    chunk: int
    chunks: int
    block: int
    blocks: int = 2
    pads: bool = False
    part: int = 1

    def basis(self) -> tuple[int, ...]:
        """Return the values of ``BASIS`` for fitting."""
        packed = self.rows in ("packed", "equal")
        rows, length = (1, sum(self.lengths)) if packed else (len(self.lengths), max(self.lengths))
        sequences = tuple((length, 1) for length in self.lengths)
        shape = BatchShape(rows, length, sequences, self.targets, packed, self.rows == "masked")
        values = dict(zip(BASIS, compute_basis(shape, 1, 1, 1), strict=True))
        values |= {"chunk": self.chunk, "chunks": 0, "block": self.block, "blocks": 0, "part": self.part}
        if self.rows != "packed":
            values |= {"second": 0, "second²": 0}
        if self.chunks == 1:
            values |= {"chunk": 0, "targets": compute_padded_size(self.targets) if self.pads else self.targets}
        elif self.pads:
            values["chunk"] = compute_padded_size(self.chunk)
        return tuple(values[name] for name in BASIS)


def build_samples(
    rows: Rows, regime: Regime, scale: Fraction = Fraction(1), *, pads: bool = False
) -> list[BatchSample]:
    """Return the shapes to trace: different in all that sizes depend on, and nothing in them a multiple of another.

    Args:
        scale: of the sequences' lengths; see ``SHORT`` and ``LONG``.
        pads: the loss pads its rows, as usually has to be done.
    """
    return [
        _build_sample(rows, tuple(int(length * scale) for length in lengths), regime, number, scale, pads)
        for number, lengths in enumerate(_LENGTHS[rows == "packed", regime.long])
    ]


# For code that loops over the tokens of sequences, and for code that loops over parts of up to 256 tokens.
SHORT, LONG = Fraction(1, 8), Fraction(4)
# Multiples of 64, as most code rounds up to fewer; sums that products in bf16 need no padding for.
_LENGTHS: dict[tuple[bool, bool], tuple[tuple[int, ...], ...]] = {
    (True, True): ((192, 384, 640), (256, 320, 768), (128, 448, 896)),
    (True, False): ((128, 256, 384), (64, 384, 448), (192, 320, 448)),
    (False, True): ((192,) * 2, (256,) * 2, (320,) * 3),
    (False, False): ((192,) * 2, (256,) * 2, (320,) * 3),
}
_TARGETS, _CHUNKED_TARGETS, _CHUNK, _BLOCK = (208, 352, 320), (304, 352, 400), (96, 112, 64), (16, 48, 32)
_PARTS = (40, 24, 88)


def _build_sample(
    rows: Rows, lengths: tuple[int, ...], regime: Regime, number: int, scale: Fraction, pads: bool
) -> BatchSample:
    tokens = sum(lengths)
    if rows == "masked":
        lengths = (lengths[0] // 2, *lengths[1:])
        tokens = len(lengths) * lengths[-1]
    targets = (_CHUNKED_TARGETS if regime.chunked else _TARGETS)[number]
    targets = tokens if regime.every else int(targets * scale) - pads
    chunk = int(_CHUNK[number] * scale) - pads if regime.chunked else targets
    block = int(_BLOCK[number] * scale)
    return BatchSample(rows, lengths, targets, chunk, 3 if regime.chunked else 1, block, pads=pads, part=_PARTS[number])


class Built(NamedTuple):
    """A model on tensors of the meta device. ``names``: of each parameter, within its unit."""

    lm: CausalLM
    blocks: list[nn.Module]
    names: dict[nn.Parameter, str]


def build_request_model(request: TraceRequest, regime: Regime, longest: int = 0) -> Built:
    """Return the model of a request as a run makes it: with its adapter, precision and recomputation.

    Args:
        longest: the length of the longest sequence that it runs on.
    """
    description = request.model
    model = _build_model(description, (0, _WINDOW) if regime.windows else (longest + 1, 2**62))
    if description.trainable is not None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(any(re.fullmatch(pattern, name) for pattern in description.trainable))
    if description.adapter and not request.hooked:
        join_adapters(model)
    packed, attention = request.rows in ("packed", "equal"), request.device.limits.attention
    kernels: Kernels = "eager"
    if request.device.fused:
        kernels = "triton" if request.device.is_gpu else "auto"
    lm = (
        CausalLM(
            model,
            packed=packed,
            z_loss=float(description.z_loss),
            router_loss=_OfAllRouters.of(model) if description.router_loss else None,
            attention=attention,
            kernels=kernels,
        )
        if description.last_block is None
        else UnlearnLM(model, packed=packed, layer=description.last_block, attention=attention, kernels=kernels)
    )
    for parameter in lm.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(_DTYPES[request.dtype])
    use_float8(lm.blocks(), description.float8)
    if packed and request.device.is_gpu:
        use_gpu_attention(lm, request.device)
    if request.device.is_gpu or request.hooked:  # then a tied embedding's gradient is not added to the head's in place
        model.get_input_embeddings().register_forward_hook(lambda *_: None)
    blocks = lm.blocks()
    save_activation_memory(blocks, "none" if request.recompute == "compiled" else request.recompute)
    names = {parameter: name for name, parameter in model.named_parameters()}
    for block in reversed(blocks):
        names |= {parameter: name for name, parameter in block.named_parameters()}
    return Built(lm.train(), blocks, names)


@dataclass(frozen=True)
class _OfAllRouters(RouterLoss):
    """The router loss of ``routers`` layers, of which those that others stand in for return no logits."""

    routers: int

    @classmethod
    def of(cls, model: Any) -> _OfAllRouters:
        """Return the loss of a model."""
        return cls(1.0, model.config.get_text_config().num_experts_per_tok, sum(map(has_experts, find_blocks(model))))

    def sum(self, logits: Sequence[torch.Tensor], batch: Batch) -> torch.Tensor:
        """Return the loss of as many logits as there are routers."""
        return super().sum([logits[number % len(logits)] for number in range(self.routers)], batch)


def _build_model(description: TracedModel, windows: tuple[int, int] | None = None) -> Any:
    """Return the model on the meta device in fp32, with its adapter. ``windows``: the least and the most that those of
    its configuration are changed to; some models have scores for each position of a window.
    """
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    stored_config = json.loads(description.configuration)
    fields = {key: value for key, value in drop_ignored(stored_config).items() if key != "source_sha256"}
    if stored_config.get("model_type") == OWN:
        fields["implementation"] = stored_config["implementation"]
    kind = fields.pop("model_type")
    register(kind)
    config = build_config(kind, fields, "model")
    if description.implementation == "gpt" and config.model_type != "gpt":
        register("gpt")
        config = convert_config(config)
    if description.dropout is not None:
        set_dropout(config, description.dropout)
    for part in _list_parts(config):
        for name in _WINDOWS:
            own = getattr(part, name, None)
            if windows is not None and own and isinstance(own, int):
                setattr(part, name, min(max(own, windows[0]), windows[1]))
        if (getattr(part, "pad_token_id", None) or 0) >= getattr(part, "vocab_size", 2**62):
            part.pad_token_id = 0
    # Random numbers for nothing would take most of the time; code of a user's own may need what these functions return.
    own = config.model_type == OWN
    with convert_creation_errors(config), torch.device("meta"), nullcontext() if own else no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if not own:
        model.tie_weights()
    if description.adapter:
        section = AdapterSection(**json.loads(description.adapter))
        if section.quantization != "none":
            import bitsandbytes

            double, keep = section.double_quantization, list_fully_trained(section)
            # Otherwise bitsandbytes would keep a table without data, and use it for other models.
            bitsandbytes.functional.name2qmap.setdefault("dynamic", bitsandbytes.functional.create_dynamic_map())
            quantize(model, section.quantization, double=double, keep=keep, experts=section.quantize_experts)
        attach_without_weights(model, section)
    return model


def _list_parts(config: Any) -> list[Any]:
    text = config.get_text_config()
    return [config] if text is config else [config, text]


@lru_cache(maxsize=8)
def read_model_facts(model: TracedModel) -> ModelFacts:
    """Return the facts of a model that do not depend on the device."""
    module = _build_model(model)
    text = module.config.get_text_config()
    embedding, head = module.get_input_embeddings().weight, module.get_output_embeddings()
    hidden, heads = embedding.shape[1], _read_number(text, "num_attention_heads")
    experts = max((_read_number(text, name) for name in _EXPERTS), default=0)
    experts_per_token = _read_number(text, "num_experts_per_tok") if experts else 0
    stands_for = {key: math.prod(shape) for key, (shape, *_) in list_quantized(module).items()}
    numel = {name: stands_for.get(id(p), p.numel()) for name, p in module.named_parameters()}
    unused = sum(count for name, count in numel.items() if ".experts." in name) if experts_per_token else 0
    windows = [
        window for part in _list_parts(module.config) for name in _WINDOWS if (window := _read_number(part, name))
    ]
    kinds = getattr(text, "layer_types", None) or []
    of_windows = sum("full" not in kind for kind in kinds) / len(kinds) if kinds else 1.0
    return ModelFacts(
        family=str(module.config.model_type),
        layers=len(find_blocks(module)),
        hidden=hidden,
        heads=heads,
        key_value_heads=_read_number(text, "num_key_value_heads") or heads,
        head_dim=_read_number(text, "head_dim") or (hidden // heads if heads else 0),
        intermediate=_read_number(text, "intermediate_size"),
        vocabulary=embedding.shape[0],
        positions=_read_number(text, "max_position_embeddings"),
        tied=head is not None and head.weight is embedding,
        total=sum(numel.values()),
        active=sum(numel.values()) - (unused - unused * experts_per_token // experts if experts else 0),
        window=min(windows, default=0),
        windowed=of_windows if windows else 0.0,
        attention=_list_attention(module),
        experts=experts,
        experts_per_token=experts_per_token,
    )


def _list_attention(model: Any) -> tuple[LayerAttention, ...]:
    """Return the attention of each kind of layer; nothing of models without it."""
    if model.config.model_type == OWN:
        return ()
    try:
        # Blocks find their formulas by backward passes, which a process that forks workers must not run.
        needs = list(needs_of(CausalLM(model, packed=False, kernels="eager"), torch.float32, 2**62))
    except AttributeError:
        return ()
    fields = LayerAttention._fields
    return tuple(LayerAttention(*(getattr(layer_needs, name) for name in fields)) for layer_needs in needs)


_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def _read_number(config: Any, name: str) -> int:
    """Return a number of a configuration, the largest of all layers if they differ; 0 if it has none."""
    values = [getattr(layer, name, 0) for layer in list_layer_configs(config)]
    return max(value if isinstance(value, int) else 0 for value in values)


def build_batch(sample: BatchSample, vocabulary: int) -> Batch:
    """Return a batch of this shape."""
    lengths = sample.lengths
    packed = sample.rows in ("packed", "equal")
    longest, positions = max(lengths), [torch.arange(length) for length in lengths]
    if packed:
        position_ids = torch.cat(positions)[None]
        boundaries = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    else:
        position_ids = nn.utils.rnn.pad_sequence(positions, batch_first=True)
        boundaries = None
    mask = None if packed else torch.stack([torch.arange(longest) < length for length in lengths])
    ids = torch.arange(position_ids.numel()).remainder(vocabulary).view(position_ids.shape)
    index = torch.arange(sample.targets)
    return Batch(
        input_ids=ids,
        position_ids=position_ids,
        lengths=lengths,
        boundaries=boundaries,
        attention_mask=mask,
        target_index=index,
        targets=ids.reshape(-1)[index],
        longest=longest,
        tokens=sum(lengths),
        weight=float(sample.targets),
        examples=tuple(range(len(lengths))),
        sequences=tuple(range(len(lengths))),
        roles=(0,) * len(lengths),
        target_counts=_divide_evenly(sample.targets, len(lengths)),
    )


def _divide_evenly(total: int, parts: int) -> tuple[int, ...]:
    equal_shares: Sequence[int] = [total // parts] * (parts - 1)
    return (*equal_shares, total - sum(equal_shares))


def list_quantized(model: nn.Module) -> dict[int, tuple[tuple[int, ...], int, int]]:
    """Return of each quantized parameter, by its ``id``, the shape that it stands for, its bytes and its scales'."""
    return {
        id(bits): (weight_format.shape, bits.nbytes, sum(buffer.nbytes for buffer in weight_format.buffers()))
        for bits, weight_format in iterate_quantized_parameters(model)
    }


_NAME = "trainwright_traced"


def use_gpu_attention(lm: CausalLM, device: Device) -> None:
    """Let the layers of a model that is trained on packs use the stand-ins."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(_NAME, partial(_compute_gpu_attention, device=device))
    lm.model.set_attn_implementation(_NAME)


def _compute_gpu_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    device: Device,
    **arguments: Unpack[PackArguments],
) -> tuple[torch.Tensor, None]:
    """Compute what ``packs.packed_attention`` does on the device: flash kernels allocate and keep the same."""
    call, sequences = call_of(module, query, key, value, arguments)
    needs = AttentionNeeds(
        query.shape[-1],
        value.shape[-1],
        DTYPES.get(query.dtype, "fp32"),
        softcap=call.softcap is not None,
        sinks=call.sinks is not None,
        dropout=bool(call.dropout),
        window=call.window is not None,
        deterministic=device.deterministic,
    )
    kernel = choose(needs, device.limits).kernel
    if kernel.memory == "sequences" and call.grouped and call.is_plain and are_equal(call):  # attend_equal_sequences
        group = query.shape[1] // key.shape[1]
        call = call._replace(key=key.repeat_interleave(group, dim=1), value=value.repeat_interleave(group, dim=1))
    padded_call = call.padded(*kernel.widths(query.shape[-1], value.shape[-1]))
    compute = varlen if kernel.memory == "flash" else attend_by_sequence
    return call.cut(compute(padded_call, sequences)), None


def compute_gpu_workspace(func: Any, args: Any, kwargs: Any) -> tuple[int, ...]:
    """Return the bytes that a GPU's attention kernels have beside their results: queries' gradients in fp32."""
    name = func.overloadpacket.__name__
    if "backward" not in name or ("attention" not in name and "attn" not in name):
        return ()
    query, key = args[1:3]
    if "varlen" in name:  # of [T, H, D]; keys' gradients for every head of the queries
        tokens, heads, size = query.shape
        sums = 4 * heads * (tokens + 128 * _SEQUENCES)
        expansion_bytes = 2 * query.nbytes if key.shape[1] != heads else 0
        return list_temporary_changes(int(sums * (-(-size // 32) * 32 + 1) + expansion_bytes))
    rows = query.numel() // query.shape[-1]
    return list_temporary_changes(int(4 * rows * (1 if query.element_size() == 4 else 1 + query.shape[-1])))


def list_temporary_changes(size: int) -> tuple[int, int]:
    """Return the changes of the live bytes by memory that an operation has while it runs."""
    return size, -size


_SEQUENCES = 3  # of a traced pack


@contextmanager
def use_gpu_functions() -> Iterator[None]:
    """Let dropout be one operation that keeps a mask of bytes, and let attention be fused where a GPU's is.

    A GPU's fused attention keeps a seed for its dropout, and takes values that are narrower than keys; that of a CPU
    takes neither.
    """
    before = nn.functional.dropout, nn.functional.scaled_dot_product_attention

    def dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        return torch.native_dropout(input, p, training)[0] if p and training else input

    def attention(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, dropout_p: float = 0.0, **kwargs: Any
    ) -> torch.Tensor:
        width = value.shape[-1]
        if width < query.shape[-1]:
            query, key = query[..., :width], key[..., :width]
        return before[1](query, key, value, *args, **kwargs)

    nn.functional.dropout, nn.functional.scaled_dot_product_attention = dropout, attention
    try:
        yield
    finally:
        nn.functional.dropout, nn.functional.scaled_dot_product_attention = before
