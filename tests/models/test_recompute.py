"""Recomputing and offloading change what is kept for the backward pass, and nothing that is computed."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from trainwright.data.stream.batch import Batch, collate
from trainwright.data.stream.stream import Stream, StreamSettings
from trainwright.data.tokens.dataset import TokenDataset
from trainwright.errors import RequestError
from trainwright.models.causal_lm import CausalLM, compile_blocks
from trainwright.models.recompute import save_activation_memory

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 5,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "num_local_experts": 4,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "attention_dropout": 0.0,
}  # fmt: skip
WAYS = [("full", False), (2, False), ("selective", False), ("none", True), ("full", True), ("selective", True)]


def build(kind: str = "llama", *, packed: bool = True, dropout: float = 0.0) -> CausalLM:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SIZES | {"attention_dropout": dropout})
    config.resid_pdrop = dropout  # where an architecture has it
    return CausalLM(AutoModelForCausalLM.from_config(config), packed=packed).train()


def a_batch(packed: bool) -> Batch:
    generator = torch.Generator().manual_seed(0)
    documents = [torch.randint(3, 64, (length,), generator=generator).tolist() for length in (9, 14, 21)]
    dataset = TokenDataset.from_examples([(ids, [True] * len(ids)) for ids in documents], "test")
    stream = Stream(dataset, StreamSettings(global_batch_size=3, seed=0, rows=3, pack_length=64 if packed else None))
    return collate(dataset, stream.global_batch(0).micro_batches[0], packed=packed, pad_token_id=0)


def results(model: CausalLM, batch: Batch) -> dict[str, torch.Tensor]:
    """The loss, all gradients, and the random number after them."""
    torch.manual_seed(7)
    model.zero_grad()
    loss = model(batch)
    loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), "random": torch.rand(1), **grads}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], **tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, msg=f"{name} differs", **tolerance or {"rtol": 0, "atol": 0})


@contextmanager
def kept_bytes() -> Iterator[Counter[str]]:
    """Counts what is kept for the backward pass, each memory once; weights are the model's own and not counted."""
    count: Counter[str] = Counter()
    seen: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen and not isinstance(tensor, nn.Parameter) and tensor._base is None:
            seen[storage.data_ptr()] = tensor
            count["bytes"] += storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        yield count


class Operations(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[operation._schema.name] += 1
        return operation(*args, **kwargs or {})


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize(("recompute", "offload"), WAYS)
def test_the_same_losses_gradients_and_random_numbers(
    recompute: str | int, offload: bool, packed: bool, dropout: float
) -> None:
    model, batch = build(packed=packed, dropout=dropout), a_batch(packed)
    names = [name for name, _ in model.named_parameters()]
    expected = results(model, batch)
    save_activation_memory(model.blocks(), recompute, offload=offload)
    assert_equal(results(model, batch), expected)
    assert [name for name, _ in model.named_parameters()] == names
    assert list(model.state_dict()) == names


@pytest.mark.parametrize("kind", ["gpt_neox", "mixtral", "phi3", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_other_architectures(kind: str, recompute: str) -> None:
    model, batch = build(kind, dropout=0.1), a_batch(True)
    expected = results(model, batch)
    save_activation_memory(model.blocks(), recompute)
    assert_equal(results(model, batch), expected)


def test_frozen_weights_and_a_frozen_embedding() -> None:
    model, batch = build(), a_batch(True)
    model.model.get_input_embeddings().requires_grad_(False)
    for block in model.blocks()[:2]:
        block.requires_grad_(False)
    expected = results(model, batch)
    save_activation_memory(model.blocks(), "full")
    assert_equal(results(model, batch), expected)


def test_less_is_kept() -> None:
    kept = {}
    for recompute in ("none", 2, "full"):
        model = build()
        save_activation_memory(model.blocks(), recompute)
        with kept_bytes() as count:
            model(a_batch(True))
        kept[recompute] = count["bytes"]
    assert kept["full"] < 0.2 * kept["none"]
    assert 2 * kept["full"] < kept[2] < 0.8 * kept["none"]


def test_every_second_block() -> None:
    model, batch = build(), a_batch(True)
    save_activation_memory(model.blocks(), 2)
    passes: Counter[int] = Counter()
    for index, block in enumerate(model.blocks(), start=1):
        block.self_attn.register_forward_hook(lambda *_, index=index: passes.update([index]))
    model(batch).backward()
    assert passes == {1: 1, 2: 2, 3: 1, 4: 2, 5: 1}


def test_matrix_products_and_attention_are_not_repeated_by_selective() -> None:
    counts = {}
    for recompute in ("none", "selective", "full"):
        model = build()
        save_activation_memory(model.blocks(), recompute)
        loss = model(a_batch(True))
        with Operations() as operations:
            loss.backward()
        counts[recompute] = operations.count
    none, selective, full = counts["none"], counts["selective"], counts["full"]
    assert none["trainwright::packed_flash_cpu"] == selective["trainwright::packed_flash_cpu"] == 0
    assert full["trainwright::packed_flash_cpu"] == 5
    assert none["aten::mm"] == selective["aten::mm"] < full["aten::mm"]
    assert none["aten::silu"] == selective["aten::silu"] == full["aten::silu"] == 5  # of gated products, always
    assert none["aten::rsqrt"] == 0 < selective["aten::rsqrt"] == full["aten::rsqrt"] == 10


def test_the_loss_itself_is_computed_once() -> None:
    """Its gradient is taken with it: the head is no part of a block."""
    model, batch = build(), a_batch(True)
    passes: Counter[str] = Counter()
    model.register_forward_hook(lambda *_: passes.update(["model"]))
    save_activation_memory(model.blocks(), "full")
    with Operations() as operations:
        model(batch).backward()
    assert passes["model"] == 1
    assert operations.count["aten::exp_"] == 1


def test_generation_and_evaluation_go_on_as_before() -> None:
    model, batch = build(), a_batch(True)
    plain = copy.deepcopy(model)
    save_activation_memory(model.blocks(), "selective", offload=True)
    prompt = torch.tensor([[5, 6, 7]])
    texts = []
    for each in (plain, model):
        with each.open_for_generation() as generator:
            texts.append(generator.generate(prompt, max_new_tokens=6, do_sample=False))
    assert torch.equal(*texts)
    assert torch.equal(plain.compute_token_losses(batch), model.compute_token_losses(batch))


def test_more_than_there_are_blocks_is_refused() -> None:
    with pytest.raises(RequestError, match=r"train\.activation_checkpointing: the model has 5 blocks.* 6th"):
        save_activation_memory(build().blocks(), 6)


@pytest.mark.slow
@pytest.mark.parametrize(("recompute", "offload"), WAYS)
def test_compiled_blocks(recompute: str | int, offload: bool) -> None:
    model, batch = build(), a_batch(True)
    expected = results(model, batch)
    save_activation_memory(model.blocks(), recompute, offload=offload)
    compile_blocks(model.blocks())
    assert_equal(results(model, batch), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_offloading_frees_the_gpu() -> None:
    peak, gradients = [], []
    for offload in (False, True):
        torch.manual_seed(0)
        block = nn.Sequential(*[nn.Linear(1024, 1024, device="cuda") for _ in range(16)])
        save_activation_memory([block], "none", offload=offload)
        inputs = torch.ones(4096, 1024, device="cuda")
        before = torch.cuda.memory_allocated()
        loss = block(inputs).square().sum()
        torch.cuda.synchronize()
        peak.append(torch.cuda.memory_allocated() - before)
        loss.backward()
        gradients.append(block[0].weight.grad)
    assert peak[1] < 0.5 * peak[0]
    assert torch.equal(*gradients)
