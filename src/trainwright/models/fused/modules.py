"""Let the modules of a model use the fused kernels, or operations in blocks on a CPU, where their formula is the same.

No table names architectures: a module's own ``forward`` is run on a few numbers and compared with the formula of the
kernel, so one that computes anything else keeps its own. Operations in blocks have to give the same bits, and the same
gradients. The numbers are real also where a run is simulated: modes such as that of fake tensors are left meanwhile.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import cache
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import checkpoint

from trainwright.models.fused import blocked, operators

_ROTARY = "apply_rotary_pos_emb"  # the function of modules of transformers
_DTYPES = (torch.float32, torch.bfloat16)


@_disable_current_modes()
def fuse_modules(model: nn.Module) -> dict[str, int]:
    """Let the modules of ``model`` use the fused kernels in place; return how many of each kind do."""
    counts, norms = _replace(model, in_blocks=False)
    block: Any
    kind: Any
    for block in list(model.modules()):
        norm, kind = getattr(block, _SECOND_NORM, None), type(block)
        eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
        if (formula := norms.get((type(norm), eps))) is not None and _has_addition_before_norm(kind):
            block.__class__ = _build_adding_block(kind, eps, *formula)
            counts["residuals"] += 1
    return counts


@_disable_current_modes()
def compute_in_blocks(model: nn.Module) -> dict[str, int]:
    """Let modules of ``model`` compute in blocks in passes with gradients on a CPU; return how many of each kind do.

    Gated MLPs compute their product again in the backward pass instead of keeping it. Measured on SmolLM2-135M in bf16,
    this takes no more time, and 3 % less memory. A compiler gets the operations of the modules, which it fuses with
    others.
    """
    return _replace(model, in_blocks=True)[0]


_Norms = dict[Any, tuple[bool, bool] | None]


def _replace(model: nn.Module, in_blocks: bool) -> tuple[dict[str, int], _Norms]:
    """Replace the ``forward`` of modules; return how many of each kind, and the formulas of norms by class and eps."""
    counts = {"norms": 0, "gated activations": 0, "rotary positions": 0, "residuals": 0}
    norms: _Norms = {}
    for module in model.modules():
        if (eps := _find_eps(module)) is not None:
            key = type(module), eps
            if key not in norms:
                norms[key] = _find_norm_formula(module, eps, in_blocks)
            if (formula := norms[key]) is not None:
                module.forward = MethodType(_build_norm_forward(eps, *formula, type(module).forward, in_blocks), module)
                counts["norms"] += 1
        elif (silu := _find_gated_formula(module)) is not None and _can_replace_gated(module, silu, in_blocks):
            module.forward = MethodType(_build_gated_forward(silu, type(module).forward, in_blocks), module)
            counts["gated activations"] += 1
        elif _can_fuse_rotary(module, in_blocks):
            module.forward = MethodType(_build_rotating_forward(type(module).forward, in_blocks), module)
            counts["rotary positions"] += 1
    return counts, norms


def _needs_own_operations(tensor: torch.Tensor, in_blocks: bool) -> bool:
    """Return whether a module computes ``tensor`` with its own operations."""
    fits = not in_blocks or (tensor.is_cpu and torch.is_grad_enabled() and not torch.compiler.is_compiling())
    return not fits or tensor.dtype == torch.float64


def _find_eps(module: nn.Module) -> float | None:
    """Return the constant of a module that may be a root-mean-square norm: its only tensor is a weight [H]."""
    parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    if list(parameters) != ["weight"] or buffers or parameters["weight"].dim() != 1 or "forward" in vars(module):
        return None
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return eps if isinstance(eps, float) else None


def _find_norm_formula(module: nn.Module, eps: float, in_blocks: bool) -> tuple[bool, bool] | None:
    """Return whether a norm adds 1 to its weight, and rounds before it multiplies; None if it is no such norm."""
    weight: Any = module.weight
    small: Any = copy.deepcopy(module, {id(weight): nn.Parameter(torch.empty(weight.shape))})
    inputs = _fill_with_numbers(small)
    for formula in ((False, True), (False, False), (True, False), (True, True)):
        if all(
            _is_same_norm(small.to(dtype), inputs.to(dtype), (eps, *formula), exactly=in_blocks) for dtype in _DTYPES
        ):
            return formula
    return None


def _fill_with_numbers(norm: nn.Module) -> torch.Tensor:
    """Fill a norm with numbers; return rows for it, some so small that its constant matters."""
    generator = torch.Generator().manual_seed(0)
    weight: Any = norm.weight
    with torch.no_grad():
        weight.copy_(torch.randn(weight.shape, generator=generator))
    return torch.randn(4, len(weight), generator=generator) * torch.tensor([[1.0], [30.0], [1e-3], [1e-2]])


def _compute_plain_norm(
    inputs: torch.Tensor, weight: torch.Tensor, eps: float, offset: bool, rounded: bool
) -> torch.Tensor:
    normal = inputs.float() * torch.rsqrt(inputs.float().pow(2).mean(-1, keepdim=True) + eps)
    factors = weight.float() + 1 if offset else weight.float()
    return ((normal.to(inputs.dtype).float() if rounded else normal) * factors).to(inputs.dtype)


def _is_same_norm(norm: Any, inputs: torch.Tensor, formula: tuple[float, bool, bool], *, exactly: bool) -> bool:
    """Return whether a norm computes a formula, ``exactly`` as blocks do, with its gradients."""
    if exactly:
        weight: nn.Parameter = norm.weight
        return _has_same_bits(lambda x, _: norm(x), lambda x, w: blocked.rms_norm(x, w, *formula)[0], inputs, weight)
    with torch.no_grad():
        try:
            out = norm(inputs)
        except _NO_SUCH_MODULE:
            return False
        expected = _compute_plain_norm(inputs, norm.weight, *formula)
    if not isinstance(out, torch.Tensor) or out.dtype != expected.dtype:
        return False
    # In bf16 the order of roundings shows in some numbers of a row, unless it is the same.
    return torch.allclose(out, expected, rtol=1e-6, atol=0)


_NO_SUCH_MODULE = (RuntimeError, TypeError, ValueError, AttributeError)


@torch.enable_grad()
def _has_same_bits(own: Callable[..., Any], other: Callable[..., Any], *inputs: torch.Tensor) -> bool:
    """Return whether two functions of some tensors have the same results and gradients."""
    for tensor in inputs:
        tensor.requires_grad_()
    try:
        results = [_add_gradients(function(*inputs), inputs) for function in (own, other)]
    except _NO_SUCH_MODULE:
        return False
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(*results, strict=True))


def _add_gradients(outs: Any, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    outs = outs if isinstance(outs, tuple) else (outs,)
    return [*outs, *torch.autograd.grad(outs, inputs, [out.detach().cos() for out in outs])]


def _build_norm_forward(
    eps: float, offset: bool, rounded: bool, own: Any, in_blocks: bool
) -> Callable[..., torch.Tensor]:
    norm = blocked.rms_norm if in_blocks else operators.rms_norm

    def forward(self: nn.Module, hidden_states: torch.Tensor, *others: Any, **named: Any) -> torch.Tensor:
        weight: Any = self.weight
        wide = in_blocks and hidden_states.element_size() > 2  # whose parts take more time than the whole
        more = others or named  # such as a gate, which recurrent blocks give their norms
        if more or weight.dtype != hidden_states.dtype or wide or _needs_own_operations(hidden_states, in_blocks):
            return own(self, hidden_states, *others, **named)
        return norm(hidden_states, weight, eps, offset, rounded)[0]

    return forward


_SECOND_NORM = "post_attention_layernorm"


@cache
def _has_addition_before_norm(block: Any) -> bool:
    """Return whether a block adds its input to its attention, and the norm of the sum through its MLP to that.

    Its class's ``forward`` is called with an object of the class whose parts are known functions; its attention has to
    get all other arguments.
    """
    arguments = {name: object() for name in ("attention_mask", "position_ids", "position_embeddings", "sequences")}
    keywords: dict[str, Any] = {}

    def attention(hidden_states: torch.Tensor, **others: Any) -> tuple[torch.Tensor, None]:
        keywords.update(others)
        return hidden_states.cos(), None

    stand_in, x = block.__new__(block), torch.linspace(-2, 2, 24).view(1, 3, 8)
    nn.Module.__init__(stand_in)
    stand_in.input_layernorm, stand_in.self_attn = torch.sin, attention
    stand_in.post_attention_layernorm, stand_in.mlp = torch.tanh, torch.exp
    try:
        out = block.forward(stand_in, x, **arguments)
    except _NO_SUCH_MODULE:
        return False
    total = x + x.sin().cos()
    set_keywords = {name: value for name, value in keywords.items() if value is not None and value is not False}
    same = isinstance(out, torch.Tensor) and torch.equal(out, total + total.tanh().exp())
    return same and set_keywords == arguments


@cache
def _build_adding_block(block: Any, eps: float, offset: bool, rounded: bool) -> type[nn.Module]:
    """Return a subclass of a block, of its name, whose first addition and second norm are one kernel.

    A class, as recomputation calls the ``forward`` of a block's class.
    """

    def forward(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        weight = getattr(self, _SECOND_NORM).weight
        # A strategy with hooks on every module gathers a norm's weight as the norm is called.
        fits = weight.dtype == hidden_states.dtype != torch.float64 and len(weight) == hidden_states.shape[-1]
        if args or not fits:
            return block.forward(self, hidden_states, *args, **kwargs)
        attention_output, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        total, normal, _ = operators.add_rms_norm(attention_output, hidden_states, weight, eps, offset, rounded)
        return total + self.mlp(normal)

    return type(block.__name__, (block,), {"forward": forward, "__module__": block.__module__})


_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def _find_gated_formula(module: nn.Module) -> bool | None:
    """Return whether a gated MLP has SiLU, False for GELU by its tanh formula; None if it is neither.

    Its class's ``forward`` is called with an object that has its activation, and projections of known results.
    """
    if "forward" in vars(module) or not all(hasattr(module, name) for name in (*_PROJECTIONS, "act_fn")):
        return None
    generator = torch.Generator().manual_seed(0)
    gate, up = (3 * torch.randn(64, generator=generator) for _ in range(2))
    results = {"gate_proj": lambda _: gate, "up_proj": lambda _: up, "down_proj": lambda x: x}
    stand_in = SimpleNamespace(**results, act_fn=module.act_fn)
    try:
        with torch.no_grad():
            out = type(module).forward(stand_in, gate)
    except _NO_SUCH_MODULE:
        return None
    if not isinstance(out, torch.Tensor) or out.shape != gate.shape:
        return None
    for silu, active in ((True, nn.functional.silu(gate)), (False, nn.functional.gelu(gate, approximate="tanh"))):
        if torch.allclose(out, active * up, rtol=1e-5, atol=1e-6):
            return silu
    return None


def _can_replace_gated(module: Any, silu: bool, in_blocks: bool) -> bool:
    """Return whether a gated MLP gets another ``forward``.

    On a CPU its product is computed again in the backward pass instead of being kept, which GELU makes slow, as does a
    projection that runs a product of matrices before it keeps its input.
    """
    return not in_blocks or (silu and type(module.down_proj) is nn.Linear)


def _build_gated_forward(silu: bool, own: Any, in_blocks: bool) -> Callable[..., torch.Tensor]:
    def fused(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(operators.gated(self.gate_proj(x), self.up_proj(x), silu))

    def recomputing(self: Any, x: torch.Tensor) -> torch.Tensor:
        if _needs_own_operations(x, in_blocks):
            return own(self, x)

        def project(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
            return self.down_proj(self.act_fn(gate) * up)

        # Stops before the product of matrices, whose input is the last tensor that it computes again.
        return checkpoint(project, self.gate_proj(x), self.up_proj(x), use_reentrant=False, preserve_rng_state=False)

    return recomputing if in_blocks else fused


def _can_fuse_rotary(module: nn.Module, in_blocks: bool) -> bool:
    """Return whether a module's ``forward`` calls a function of its file that is the kernel's formula."""
    forward: Any = type(module).forward
    if "forward" in vars(module) or _ROTARY not in getattr(getattr(forward, "__code__", None), "co_names", ()):
        return False
    return _is_rotary(forward.__globals__.get(_ROTARY), in_blocks)


@cache
def _is_rotary(function: Any, in_blocks: bool) -> bool:
    generator = torch.Generator().manual_seed(0)
    heads = [torch.randn(1, count, 3, 8, generator=generator) for count in (4, 2)]
    cos, sin = (torch.randn(1, 3, 8, generator=generator) for _ in range(2))
    if in_blocks:
        numbers = [[tensors.to(dtype) for tensors in (*heads, cos, sin)] for dtype in _DTYPES]
        return all(_rotate_alike(function, *tensors) for tensors in numbers)
    try:
        out = function(*heads, cos, sin)
    except _NO_SUCH_MODULE:
        return False
    expected = [_compute_plain_rotary(x, cos, sin) for x in heads]
    return len(out) == 2 and all(map(torch.allclose, out, expected))


def _rotate_alike(function: Any, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
    return _has_same_bits(
        lambda q, k: function(q, k, cos, sin), lambda q, k: blocked.rotary(q, k, cos, sin, False), q, k
    )


def _compute_plain_rotary(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = heads.chunk(2, -1)
    return heads * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]


@cache
def _build_rotating_forward(own: Any, in_blocks: bool) -> Callable[..., Any]:
    """Return the ``forward`` of a class with other rotary positions.

    It is one function for all modules of the class, with a code object of its own: the compiler keeps what it has
    compiled with the code object, and finds it by a name among the globals of the function. Without a name of their
    own, it does not take these for those of the module.
    """
    names = {**own.__globals__, _ROTARY: _build_rotary(own.__globals__[_ROTARY], in_blocks)}
    del names["__name__"]
    rotating = FunctionType(own.__code__.replace(), names, own.__name__, own.__defaults__, own.__closure__)
    rotating.__module__ = own.__module__
    rotating.__kwdefaults__ = own.__kwdefaults__
    return rotating


def _build_rotary(own: Callable[..., Any], in_blocks: bool) -> Callable[..., Any]:
    rotary = blocked.rotary if in_blocks else operators.rotary

    def apply(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        fits = (
            q.dtype == k.dtype == cos.dtype == sin.dtype and not _needs_own_operations(q, in_blocks) and cos.dim() == 3
        )
        fits = fits and q.shape[-1] == k.shape[-1] == cos.shape[-1] and q.stride(-1) == k.stride(-1) == 1
        return (
            rotary(q, k, cos, sin, False) if fits and not args and not kwargs else own(q, k, cos, sin, *args, **kwargs)
        )

    return apply
