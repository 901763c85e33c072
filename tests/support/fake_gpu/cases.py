"""Attention over packs on fake GPUs: which operations run, for single layers and whole models; as JSON.

python -m tests.support.fake_gpu.cases
"""

from __future__ import annotations

import itertools
import json
from typing import Any

from tests.support.fake_gpu import fake_gpu
from trainwright.planning.simulation.start import load_simulated_device

load_simulated_device()

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

from trainwright.data.stream.batch import collate  # noqa: E402
from trainwright.data.stream.stream import MicroBatch  # noqa: E402
from trainwright.data.tokens.dataset import TokenDataset  # noqa: E402
from trainwright.models.attention import packs  # noqa: E402
from trainwright.models.attention.sequences import Sequences  # noqa: E402
from trainwright.models.causal_lm import CausalLM  # noqa: E402

EDGES = (0, 100, 130, 300)
EQUAL = (0, 100, 200, 300)
# Capability, dtype, widths of keys and values, and the arguments of the attention function.
LAYERS: dict[str, tuple[tuple[int, int], torch.dtype, int, int, dict[str, Any]]] = {
    "plain": ((9, 0), torch.bfloat16, 64, 64, {}),
    "window": ((9, 0), torch.bfloat16, 64, 64, {"sliding_window": 16}),
    "old GPU, bf16": ((7, 5), torch.bfloat16, 64, 64, {}),
    "old GPU, fp16": ((7, 5), torch.float16, 64, 64, {}),
    "old GPU, equal sequences": ((7, 5), torch.float16, 64, 64, {"edges": EQUAL}),
    "heads of 512": ((9, 0), torch.bfloat16, 512, 512, {}),
    "heads of 20": ((9, 0), torch.bfloat16, 20, 20, {}),
    "wider values": ((9, 0), torch.bfloat16, 64, 96, {}),
    "narrower values": ((9, 0), torch.bfloat16, 192, 128, {}),
    "softcap": ((9, 0), torch.bfloat16, 64, 64, {"softcap": 30.0}),
    "sinks": ((9, 0), torch.bfloat16, 64, 64, {"s_aux": True, "sliding_window": 16}),
    "dropout": ((9, 0), torch.bfloat16, 64, 64, {"dropout": 0.1}),
    "dropout with softcap": ((9, 0), torch.bfloat16, 64, 64, {"dropout": 0.1, "softcap": 30.0}),
    "fp32": ((9, 0), torch.float32, 64, 64, {}),
}
_COMMON = {
    **{"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"vocab_size": 128, "max_position_embeddings": 4096},
}
_MODELS: dict[str, dict[str, Any]] = {
    "llama": _COMMON,
    "mistral": {**_COMMON, "sliding_window": 24},
    "gemma2": {**_COMMON, "head_dim": 16, "sliding_window": 32},
    "gpt2": {"n_embd": 64, "n_head": 4, "vocab_size": 128, "attn_pdrop": 0.1},
}


def layer(name: str) -> dict[str, Any]:
    """Run one layer forward and backward; return its operations, and whether SDPA got fewer heads of keys."""
    capability, dtype, size, value_size, given = LAYERS[name]
    given = dict(given)
    places = given.pop("edges", EDGES)
    edges, longest = torch.tensor(places, dtype=torch.int32), max(b - a for a, b in itertools.pairwise(places))
    packs._chosen.clear()
    with fake_gpu(capability) as seen, _Grouped() as grouped:
        widths = ((4, size), (2, size), (2, value_size))
        inputs = [torch.empty(1, n, 300, w, device="cuda", dtype=dtype).requires_grad_() for n, w in widths]
        if given.get("s_aux"):
            given["s_aux"] = torch.empty(4, device="cuda").requires_grad_()
        sequences = Sequences(edges, longest, inputs[0].device)
        seen.clear()
        output, _ = packs.packed_attention(
            nn.Identity(), *inputs, None,
            cu_seq_lens_q=sequences.boundaries, max_length_q=longest, sequences=sequences, **given,
        )  # fmt: skip
        output.sum().backward()
        return {"shape": list(output.shape), "operations": sorted(set(seen)), "grouped": any(grouped.asked)}


class _Grouped(TorchFunctionMode):
    """Watch whether SDPA is asked to repeat heads of keys."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[bool] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.scaled_dot_product_attention:
            self.asked.append(bool((kwargs or {}).get("enable_gqa")))
        return func(*args, **(kwargs or {}))


def model(kind: str) -> list[str]:
    """Run a model forward and backward; return the names of all operations in order."""
    lengths = (100, 30, 57, 40)
    dataset = TokenDataset.from_examples([([3] * n, [True] * n) for n in lengths], "fake")
    micro = MicroBatch(index=0, rows=((0, 1), (2, 3)), tokens=sum(lengths), targets=sum(lengths) - 4, weight=1.0)
    batch = collate(dataset, micro, packed=True, pad_token_id=0)
    packs._chosen.clear()
    with fake_gpu((9, 0)) as seen:
        config = AutoConfig.for_model(kind, num_hidden_layers=2, **_MODELS[kind])
        with torch.device("cuda"):
            made = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        lm = CausalLM(made, packed=True).train()
        here = batch.to(torch.device("cuda", 0))
        seen.clear()
        lm(here).backward()
        return list(seen)


if __name__ == "__main__":
    packs.list_missing_kernels = lambda: tuple(
        (name, "is not installed") for name in ("flash_attn_4", "flash_attn_3", "flash_attn")
    )
    print(
        json.dumps(
            {"layers": {name: layer(name) for name in LAYERS}, "models": {kind: model(kind) for kind in _MODELS}}
        )
    )
