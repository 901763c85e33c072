"""What a training program does by habit, whatever model and strategy. Imports no torch.

Plans are of this program. Figures that others published are of theirs, which keep other numbers and run other kernels:
to compare the two, the model of memory and time is told what theirs do, and is the same model otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainwright.parallel.zero.spec import BUCKET_ELEMENTS

Attention = Literal[1, 2, 3, "early"]
Loss = Literal["chunked", "full", "narrow", "freed", "fused", "widened"]


@dataclass(frozen=True)
class Stack:
    """The defaults are this program's habits.

    ``kept``: bytes of a trained number, of its summed gradient and of each number that the optimizer keeps of it: 4 are
    fp32 masters beside what computes, 2 are weights that are trained as they compute. ``state``: of the optimizer's,
    where they are others. ``exchanged``: bytes of a gradient that is summed over processes. ``loss``: "chunked": a part
    of the logits at a time; "full": all of them, in fp32 too, which are held to the end of the step, as transformers'
    and torchtune's; "narrow": the same in the precision of the model alone; "freed": as full, but let go once the loss
    is there; "fused": all of them, which become their own gradient; "widened": the same with a copy of them in fp32.
    ``updates_in_backward``: each weight as soon as its gradient is there. ``fused``: norms, rotary positions and
    activations are kernels of their own (Liger, Transformer Engine). ``compiles_loss``: with the
    blocks. ``attention``: generation of FlashAttention; "early": torch's kernels on AMD in 2024. ``bucket``: elements
    that DeepSpeed reduces at a time.
    ``launch``: factor on the time that Python takes to start a kernel. ``sorted_rows``: how many rows are sorted by
    length before they are cut into micro-batches; None: those of a step. ``saves_inputs``: products with quantised
    matrices keep what enters them (github.com/bitsandbytes-foundation/bitsandbytes/issues/642). ``expert_linears``:
    experts are linear modules, and quantised (transformers before 5). ``wide_adapters``: what enters an adapter is made
    fp32 before it is made narrow again (PEFT's autocast_adapter_dtype under autocast). ``foreach``: the
    optimizer works on all weights at once, with one temporary for each (torch.optim.AdamW's default).
    ``alternates``: selective recomputation keeps every second of a block's matrix products alone, and of experts none
    (torchtitan, distributed/activation_checkpoint.py). ``sums_whole``: micro-batches but the last of a step leave
    their gradients where they are, whole on every rank and as wide as they are exchanged (FSDP's
    set_requires_gradient_sync). ``cuts_scales``: those of a quantised base are sharded with it (torchao's NF4Tensor).
    ``holds_inputs``: what enters a recomputed block of frozen weights, and its gradient, stay until the backward pass
    is over (the first FSDP's _register_post_backward_reshard_only_hook, which has hold of the inputs). ``caches_keys``:
    keys and values of all blocks are kept, as for generating text (transformers' use_cache, which its own
    recomputation switches off and that of others does not).
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
    sums_whole: bool = False
    cuts_scales: bool = False
    holds_inputs: bool = False
    caches_keys: bool = False

    @property
    def state_bytes(self) -> float:
        """Of a number that the optimizer keeps."""
        return self.kept if self.state is None else self.state


OWN = Stack()
