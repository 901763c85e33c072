"""Trace a model's first block on fake tensors and record allocations and releases in order."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainwright.data.stream.batch import Batch
from trainwright.models.causal_lm import CausalLM
from trainwright.models.configuration import register
from trainwright.models.recompute import save_activation_memory
from trainwright.models.truncate_config import cut_config, layer_count

TraceEvent = list[Any]
_LAYERS = 2  # number of layers of the model whose first block is traced
_DTYPES = {2: torch.bfloat16, 4: torch.float32}


def layout_of(config: dict[str, Any]) -> dict[str, Any]:
    """Return the sizes of a model for a plan, and its parameters as [unit, name, rows, columns]."""
    with _fake():
        model = _model(config, torch.float32)
        lm = CausalLM(model, packed=False)
        blocks = lm.blocks()
        inside = {id(p): (unit, name) for unit, block in enumerate(blocks) for name, p in block.named_parameters()}
        embedding = model.get_input_embeddings().weight
        head = model.get_output_embeddings()
        whole_logits = head is None
        if head is None:  # a module of one's own with logits: of its linear layers the one as wide as the vocabulary
            linear = [m for m in model.modules() if isinstance(m, nn.Linear) and m.out_features == embedding.shape[0]]
            head = linear[-1]
        weights = []
        for name, p in model.named_parameters():
            unit, called = inside.get(id(p), (-1, name))
            if unit < 0:
                known = {id(embedding): "embedding", id(head.weight): "head", id(head.bias): "head.bias"}
                called = known.get(id(p), "final_norm" if p.dim() == 1 else "positions")
                called += ".bias" if p.dim() == 1 and name.endswith("bias") and called == "final_norm" else ""
            weights.append([unit, called, p.shape[0], p.numel() // max(1, p.shape[0])])
        text = model.config.get_text_config()
        heads = getattr(text, "num_attention_heads", 1)
        positions = [w for w in weights if w[1] == "positions"]
        return {
            "layers": len(blocks),
            "hidden": embedding.shape[1],
            "heads": heads,
            "key_value_heads": getattr(text, "num_key_value_heads", None) or heads,
            "vocabulary": embedding.shape[0],
            "intermediate": max((p.shape[0] for p in blocks[0].parameters() if p.dim() == 2), default=1),
            "positions": positions[0][2] if positions else getattr(text, "max_position_embeddings", None) or 2048,
            "learned_positions": bool(positions),
            "tied": head.weight is embedding,
            "whole_logits": whole_logits,
            "head_bias": head.bias is not None,
            "norm_bias": any(w[1] == "final_norm.bias" for w in weights),
            "weights": weights,
        }


def timeline(
    config: dict[str, Any],
    recompute: str,
    width: int,
    packed: bool,
    masked: bool,
    input_wants: bool,
    rows: int,
    length: int,
) -> dict[str, list[TraceEvent]]:
    """Return the allocations, releases and gradients of the first block: without gradients, forward, and backward."""
    with _fake():
        lm = CausalLM(_model(config, _DTYPES[width], _LAYERS), packed=packed).train()
        block = lm.blocks()[0]
        hidden, arguments, named = _call(lm, block, _batch(lm, packed, masked, rows, length))
        if not masked and "attention_mask" in named:  # transformers makes a mask if it cannot inspect the tokens
            named["attention_mask"] = None
        save_activation_memory([block], recompute)
        recorder = _Recorder([*lm.parameters(), *lm.buffers(), *tree_leaves([hidden, arguments, named])])
        lines: dict[str, list[TraceEvent]] = {}
        with torch.no_grad(), recorder:
            made = [recorder.note(hidden.clone())]
            block(made.pop(), *arguments, **named)
        gc.collect()
        lines["evaluation"] = recorder.take()
        leaf = recorder.ignore(hidden.clone().requires_grad_(input_wants))
        with recorder:
            given = leaf * 1
            storage = weakref.ref(given.untyped_storage())
            made = [given]
            del given
            output = block(made.pop(), *arguments, **named)
            made = [output[0] if isinstance(output, tuple) else output]
            del output
            gc.collect()
            lines["forward"] = recorder.take()
            size = made[0].untyped_storage().nbytes()
            lines["forward"] += [["end", "output", size], ["end", "width", width]]
            lines["forward"].append(["end", "keeps_input", int(storage() is not None)])
            for name, parameter in block.named_parameters():
                parameter.register_post_accumulate_grad_hook(recorder.gradient(name))
            grads = [torch.ones_like(made[0])]
            recorder.take()
            if made[0].requires_grad:
                torch.autograd.backward(made.pop(), grads.pop())
            gc.collect()
            lines["backward"] = recorder.take()
        return lines


class _Recorder(TorchDispatchMode):
    """Record the allocation and release of every storage that did not exist ``before``."""

    def __init__(self, before: Iterable[Any]) -> None:
        super().__init__()
        self._before = [value for value in before if isinstance(value, torch.Tensor)]
        self._events: list[TraceEvent] = []
        self._known: dict[int, Any] = {tensor.untyped_storage()._cdata: None for tensor in self._before}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor):
                self.note(value)
        return result

    def note(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._events.append(["+", "", size])
            self._known[key] = weakref.finalize(storage, self._end, key, size)
        return tensor

    def ignore(self, tensor: torch.Tensor) -> torch.Tensor:
        self._before.append(tensor)
        self._known[tensor.untyped_storage()._cdata] = None
        return tensor

    def _end(self, key: int, size: int) -> None:
        self._known.pop(key, None)
        self._events.append(["-", "", size])

    def gradient(self, name: str) -> Callable[[torch.Tensor], None]:
        """Return a hook that records and drops the gradient of a parameter."""

        def take(parameter: torch.Tensor) -> None:
            grad = parameter.grad
            assert grad is not None
            storage = grad.untyped_storage()
            known = self._known.pop(storage._cdata, None)
            if known is not None:
                known.detach()
                self._events.append(["gradient", name, storage.nbytes()])
            parameter.grad = None

        return take

    def take(self) -> list[TraceEvent]:
        taken, self._events = self._events, []
        return taken


def _model(config: dict[str, Any], dtype: torch.dtype, layers: int | None = None) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    values = dict(config)
    register(values["model_type"])
    made = AutoConfig.for_model(values.pop("model_type"), **values)
    if layers is not None:
        made = cut_config(made, min(layers, layer_count(made)))
    return AutoModelForCausalLM.from_config(made, dtype=dtype)


def _batch(lm: CausalLM, packed: bool, masked: bool, rows: int, length: int) -> Batch:
    tokens = rows * length
    shape = (1, tokens) if packed else (rows, length)
    ids = torch.zeros(shape, dtype=torch.long)
    return Batch(
        input_ids=ids,
        position_ids=torch.zeros(shape, dtype=torch.long),
        lengths=(),
        boundaries=torch.zeros(rows + 1, dtype=torch.int32) if packed else None,
        attention_mask=torch.ones(shape, dtype=torch.bool) if masked else None,
        target_index=torch.zeros(1, dtype=torch.long),
        targets=torch.zeros(1, dtype=torch.long),
        longest=length,
        tokens=tokens,
        weight=1.0,
        examples=(),
        sequences=(),
        roles=(),
        target_counts=(),
    )


def _call(lm: CausalLM, block: nn.Module, batch: Batch) -> tuple[torch.Tensor, tuple[Any, ...], dict[str, Any]]:
    """Return the arguments that the block is called with: its input, and the others."""
    seen: dict[str, Any] = {}

    def note(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        seen.update(arguments=arguments, named=named)

    handle = block.register_forward_pre_hook(note, with_kwargs=True)
    with torch.no_grad():
        lm._hidden(batch)
    handle.remove()
    named = dict(seen["named"])
    hidden = seen["arguments"][0] if seen["arguments"] else named.pop("hidden_states")
    return hidden, seen["arguments"][1:], named


@contextmanager
def _fake() -> Iterator[None]:
    from transformers.utils import logging

    # Collections in a trace are for what it makes: all that is imported would cost them most of their time.
    is_frozen = gc.get_freeze_count() > 0
    gc.freeze()
    level = logging.get_verbosity()
    logging.set_verbosity_error()  # a model's own messages are shown when it is trained
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        if not is_frozen:  # as in what was forked; see run/process.py
            gc.unfreeze()
