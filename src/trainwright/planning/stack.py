"""The defaults of a training program, independent of model and strategy. Imports no torch.

Plans are for this program. Published figures are of other programs, with other precisions and kernels: to compare with
them, the model of memory and time takes their defaults, and is otherwise the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainwright.parallel.zero.spec import BUCKET_ELEMENTS

Attention = Literal[1, 2, 3, "early", "math"]
Loss = Literal["chunked", "full", "narrow", "freed", "fused", "widened"]
Experts = Literal["grouped", "fused", "sliced", "permuted", "padded"]


@dataclass(frozen=True)
class Stack:
    """The defaults of a training program; the field defaults are this program's.

    ``kept``: bytes per element of a trained weight, its accumulated gradient and each optimizer state: 4 for fp32
    master weights, 2 for weights that are trained in the precision that computes. ``state``: of the optimizer
    state, if different. ``exchanged``: bytes per element of gradients reduced over processes. ``loss``: "chunked":
    the logits in chunks; "full": all logits, also in fp32, held to the end of the step, as in transformers and
    torchtune; "narrow": the same only in the model's precision; "freed": as full, but freed once the loss is
    computed; "fused": all logits, overwritten by their gradient; "widened": the same with an fp32 copy.
    ``updates_in_backward``: each weight is updated as soon as its gradient is ready. ``fused``: norms, rotary
    positions and activations are single kernels (Liger, Transformer Engine). ``compiles_loss``: together with the
    blocks. ``attention``: generation of FlashAttention; "early": torch's kernels on AMD in 2024; "math": single
    operations, with all scores in memory. ``bucket``: elements that DeepSpeed reduces at a time. ``launch``: factor
    on the time in which Python launches a kernel. ``sorted_rows``: number of rows that are sorted by length before
    they are divided into micro-batches; None: those of a step. ``saves_inputs``: products with quantized matrices
    save their input (github.com/bitsandbytes-foundation/bitsandbytes/issues/642). ``expert_linears``: experts are
    linear modules, and quantized (transformers before 5). ``wide_adapters``: the input of an adapter is cast to
    fp32 and back (PEFT's autocast_adapter_dtype under autocast). ``foreach``: the optimizer updates all weights at
    once, with one temporary each (torch.optim.AdamW's default). ``alternates``: selective recomputation only keeps
    every second of a block's matrix products, and none of experts (torchtitan,
    distributed/activation_checkpoint.py). ``sums_unsharded``: all micro-batches of a step but the last keep their
    gradients unsharded on every rank, in the width in which they are exchanged (FSDP's set_requires_gradient_sync).
    ``cuts_scales``: the scales of a quantized base model are sharded with it (torchao's NF4Tensor).
    ``holds_inputs``: the input of a recomputed block of frozen weights, and its gradient, stay until the end of the
    backward pass (FSDP1's _register_post_backward_reshard_only_hook, which holds the inputs). ``caches_keys``: keys
    and values of all blocks are kept, as for generation (transformers' use_cache, which its own recomputation
    disables and others do not). ``keeps_outputs``: what a forward pass returns, its logits and cached keys, stays
    until the next one has returned (a loop that binds it to the same name every time). ``keeps_routes``: a router
    keeps its auxiliary loss, and with its graph what recomputation has saved up to the router, until the block's
    next pass (KempnerForge, model/router.py). ``fetches_ahead``: offloaded activations of a block are copied back while
    the next block runs backward (others copy each when it is needed, as torch's save_on_cpu).
    ``grows_chunks``: on a GPU, chunks of logits are as large as the hidden states. ``experts``: how the
    products of experts are computed. "grouped": in one
    kernel; "fused": the same, with one kernel each to sort the rows, for the activation and scores, and to sum the
    results, of which a rank receives every row once and returns one sum (Transformer Engine; DeepEP); "sliced": one
    after another, each with a slice of one matrix, whose gradient has the size of all experts (transformers 4,
    granitemoe); "permuted": in one kernel, with one more copy of the rows for a number of each expert that is a
    multiple of eight, and scores in fp32; a compiler leaves the copies alone (torchtitan in 2025, models/moe/utils.py);
    "padded": at once, every expert with as many rows as the longest has, which are all tokens as long as the router is
    as it was drawn (KempnerForge, model/moe.py). ``expert_parallel``: number of ranks that divide the experts of a
    block between them; each receives the rows of its own experts from all of them, and returns the results (arXiv
    2006.16668). ``sequence_parallel``: number of ranks that divide each row between them; for attention they exchange
    positions for heads (arXiv 2309.14509).
    """

    kept: int = 4
    state: float | None = None
    exchanged: int = 4
    loss: Loss = "chunked"
    updates_in_backward: bool = False
    fused: bool = False
    compiles_loss: bool = False
    attention: Attention = 2
    bucket: int = BUCKET_ELEMENTS
    launch: float = 1.0
    sorted_rows: int | None = None
    saves_inputs: bool = False
    expert_linears: bool = False
    wide_adapters: bool = False
    foreach: bool = False
    alternates: bool = False
    sums_unsharded: bool = False
    cuts_scales: bool = False
    holds_inputs: bool = False
    caches_keys: bool = False
    keeps_outputs: bool = False
    keeps_routes: bool = False
    fetches_ahead: bool = True
    grows_chunks: bool = True
    experts: Experts = "grouped"
    expert_parallel: int = 1
    sequence_parallel: int = 1

    @property
    def state_bytes(self) -> float:
        """Bytes per element of optimizer state."""
        return self.kept if self.state is None else self.state


OWN = Stack()
