"""Models whose modules use the fused kernels, in Triton's interpreter, compared with their own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.interpreted import needs_interpreter
from tests.support.operations import Operations
from tests.support.slow import slow_but
from trainwright.models.fused import blocked
from trainwright.models.fused.modules import compute_in_blocks, fuse_modules
from trainwright.models.recompute import save_activation_memory

_SIZES = {
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 99,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def model_of(kind: str, **more: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **_SIZES, **more))
    for parameter in model.parameters():  # norms too, whose weights are ones or zeros
        nn.init.normal_(parameter, 0.1, 0.2)
    return model


@pytest.mark.parametrize(
    ("kind", "counts"),
    [
        ("llama", (5, 2, 2, 2)),
        ("qwen3", (9, 2, 2, 2)),  # also norms of queries and keys
        ("gemma2", (9, 2, 2, 0)),  # 1 is added to weights; GELU; results are normalized before they are added
        ("phi3", (5, 0, 2, 0)),  # gate and up are one matrix; dropout before additions
        ("glm", (5, 0, 0, 2)),  # pairs of neighbors are rotated
        ("cohere", (0, 2, 0, 0)),  # norms take the mean off
    ],
)
def test_modules_whose_formula_is_a_kernels_are_recognized(kind: str, counts: tuple[int, ...]) -> None:
    assert tuple(fuse_modules(model_of(kind)).values()) == counts


@pytest.mark.parametrize("replace", [fuse_modules, compute_in_blocks])
def test_a_norm_that_gets_a_gate_uses_it(replace: Any) -> None:
    from transformers.models.granitemoehybrid.modeling_granitemoehybrid import GraniteMoeHybridRMSNormGated

    norm: Any = GraniteMoeHybridRMSNormGated(8, group_size=8)
    inputs, gate = torch.randn(2, 3, 8)
    assert replace(nn.Sequential(norm))["norms"] == 1
    assert torch.equal(norm(inputs, gate), type(norm).forward(norm, inputs, gate))
    assert not torch.equal(norm(inputs, gate), norm(inputs))


@pytest.mark.parametrize("replace", [fuse_modules, compute_in_blocks])
def test_formulas_are_found_where_a_run_is_simulated(replace: Any) -> None:
    with FakeTensorMode():
        counts = replace(model_of("llama"))
    assert (counts["norms"], counts["rotary positions"]) == (5, 2)


@pytest.mark.parametrize("replace", [fuse_modules, compute_in_blocks])
def test_modules_of_a_class_share_a_function_with_a_code_object_of_its_own(replace: Any) -> None:
    model = model_of("llama")
    replace(model)
    first, second = (layer.self_attn for layer in model.model.layers)
    assert first.forward.__func__ is second.forward.__func__
    assert first.forward.__func__.__code__ is not type(first).forward.__code__


def test_a_norm_that_differs_in_little_is_left_as_it_is() -> None:
    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(16))
            self.eps = 1e-6

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.weight * x / (x.norm(dim=-1, keepdim=True) / 4 + self.eps)

    assert fuse_modules(nn.Sequential(Norm()))["norms"] == 0


@needs_interpreter
@pytest.mark.parametrize("kind", slow_but("llama", among=["llama", "qwen3", "gemma2"]))
def test_a_fused_model_computes_what_its_own_modules_do(kind: str) -> None:
    model = model_of(kind)
    fused = copy.deepcopy(model)
    assert sum(fuse_modules(fused).values()) > 9
    tokens = torch.arange(14).remainder(11).view(2, 7)
    for one in (model, fused):
        one(input_ids=tokens, labels=tokens).loss.backward()
    for (name, own), other in zip(model.named_parameters(), fused.parameters(), strict=True):
        assert own.grad is not None and other.grad is not None
        assert (own.grad - other.grad).norm() <= 1e-5 * own.grad.norm() + 1e-9, name


def test_recomputed_blocks_use_the_fused_sum_and_keep_their_name() -> None:
    model = model_of("llama")
    fuse_modules(model)
    block = model.model.layers[0]
    assert type(block).__name__ == "LlamaDecoderLayer"
    tokens = torch.arange(7)[None]
    with FakeTensorMode(allow_non_fake_inputs=True), Operations() as operations:
        save_activation_memory(list(model.model.layers), "full")
        model(input_ids=tokens, labels=tokens).loss.backward()
    assert operations.names.count("add_rms_norm") == 4  # two blocks, forward and again


def test_a_block_that_adds_otherwise_keeps_its_own_code() -> None:
    class Half(nn.Module):
        def __init__(self, layer: Any) -> None:
            super().__init__()
            for name, part in layer.named_children():
                self.add_module(name, part)

        def forward(self, hidden_states: torch.Tensor, **arguments: Any) -> torch.Tensor:
            attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **arguments)
            hidden_states = hidden_states + 0.5 * attended
            added: torch.Tensor = hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))
            return added

    assert fuse_modules(nn.Sequential(Half(model_of("llama").model.layers[0])))["residuals"] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "norms", "gated"), [("llama", 5, 2), ("qwen3", 9, 2), ("gemma2", 9, 0), ("olmo2", 9, 2)]
)
def test_a_model_in_blocks_has_the_losses_and_gradients_of_its_own_modules(
    kind: str, norms: int, gated: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocked, "PART_TOKENS", 64)  # 160 tokens are two parts and a smaller one
    model: Any = model_of(kind).to(dtype)
    parts = copy.deepcopy(model)
    assert tuple(compute_in_blocks(parts).values()) == (norms, gated, 2, 0)
    tokens = torch.arange(160).remainder(11).view(2, 80)
    results = []
    for one in (model, parts):
        with _Results() as forward:
            loss = one(input_ids=tokens, labels=tokens).loss
        kept = forward.count_kept_bytes()
        loss.backward()
        results.append((loss, kept))
    (loss, kept), (other_loss, kept_of_parts) = results
    assert torch.equal(loss, other_loss)
    products = 2 * gated * dtype.itemsize * tokens.numel() * _SIZES["intermediate_size"]
    assert kept_of_parts < kept - products if dtype == torch.bfloat16 else kept_of_parts == kept - products
    for (name, own), other in zip(model.named_parameters(), parts.parameters(), strict=True):
        assert own.grad is not None and other.grad is not None
        assert torch.equal(own.grad, other.grad), name


class _Results(TorchDispatchMode):
    """Which results of operations are kept for the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self._memory: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self._memory[StorageWeakRef(storage)] = storage.nbytes()
        return out

    def count_kept_bytes(self) -> int:
        return sum(size for memory, size in self._memory.items() if not memory.expired())


def test_a_gated_product_is_computed_again_without_its_projection() -> None:
    model: Any = model_of("llama")
    compute_in_blocks(model)
    tokens = torch.arange(40)[None]
    loss = model(input_ids=tokens, labels=tokens).loss
    with Operations() as backward:
        loss.backward()
    assert backward.names.count("silu") == 2
    assert backward.names.count("mm") == 2 * (7 * 2) + 2  # two of each of seven matrices of a block, and of the head


def test_a_gated_product_before_another_kind_of_projection_is_kept() -> None:
    class Projection(nn.Linear):  # such as an adapter's
        pass

    model: Any = model_of("llama")
    model.model.layers[1].mlp.down_proj.__class__ = Projection
    assert compute_in_blocks(model)["gated activations"] == 1


def test_passes_without_gradients_and_compiled_ones_have_the_modules_own_operations() -> None:
    model = model_of("llama").bfloat16()
    compute_in_blocks(model)
    tokens = torch.arange(7)[None]

    def names() -> list[str]:
        with Operations() as operations:
            model(input_ids=tokens)
        return [name for name in operations.names if name.startswith("blocked")]

    assert len(names()) == 5 + 2
    with torch.no_grad():
        assert names() == []
    graph = torch.export.export(model, (tokens,), {"use_cache": False}, strict=False).graph
    assert "blocked" not in str(graph)


@pytest.mark.parametrize("evaluated_first", [False, True])
def test_blocks_are_compiled_for_passes_with_and_without_gradients(evaluated_first: bool) -> None:
    model, tokens = model_of("llama"), torch.arange(7)[None]
    expected = model(input_ids=tokens).logits
    compute_in_blocks(model)
    for layer in model.model.layers:
        layer.compile(dynamic=True, backend="eager")
    for is_evaluation in (evaluated_first, not evaluated_first):
        with torch.set_grad_enabled(not is_evaluation):
            torch.testing.assert_close(model(input_ids=tokens).logits, expected)


def test_a_norm_that_rounds_otherwise_keeps_its_own_code() -> None:
    class Norm(nn.Module):  # multiplies by the weight first, which is the same but for the last bits
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(16))
            self.eps = 1e-6

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            wide = x.float()
            normal = (wide * self.weight.float()) * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
            return normal.to(x.dtype)

    assert compute_in_blocks(nn.Sequential(Norm()))["norms"] == 0
