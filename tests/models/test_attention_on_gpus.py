"""Attention over packs on GPUs that are not there: fake tensors, on which no value can be read by the host."""

from __future__ import annotations

import collections
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.fake_gpu import in_process
from trainwright.data.stream.batch import collate
from trainwright.data.stream.stream import MicroBatch
from trainwright.data.tokens.dataset import TokenDataset
from trainwright.models.causal_lm import CausalLM

pytestmark = pytest.mark.slow

VARLEN, FLEX = "torch_attn::_varlen_attn", "flex_attention"
OLD = ("old GPU, bf16", "old GPU, fp16", "old GPU, equal sequences")
# What makes the host wait for a GPU.
WAITS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::masked_select", "aten::equal"}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """Run all cases in one process, since torch has to be told of the GPU before it is imported."""
    return in_process("tests.support.fake_gpu.cases")


@pytest.mark.parametrize("name", ["plain", "window", "heads of 20", "wider values", "narrower values"])
def test_flash_attention_takes_what_it_can(found: dict[str, Any], name: str) -> None:
    assert VARLEN in found["layers"][name]["operations"]
    assert f"{VARLEN}_backward" in found["layers"][name]["operations"]


@pytest.mark.parametrize("name", [*OLD, "heads of 512", "dropout", "fp32"])
def test_flash_attention_gets_nothing_that_it_refuses(found: dict[str, Any], name: str) -> None:
    assert not {VARLEN, FLEX} & set(found["layers"][name]["operations"])


def test_the_memory_efficient_kernel_gets_no_groups_of_heads(found: dict[str, Any]) -> None:
    # It takes none, so that torch would compute and keep all scores.
    assert not any(layer["grouped"] for layer in found["layers"].values())


@pytest.mark.parametrize("name", ["softcap", "sinks"])
def test_soft_caps_and_sinks_keep_no_scores(found: dict[str, Any], name: str) -> None:
    operations = set(found["layers"][name]["operations"])
    assert {FLEX, "flex_attention_backward"} <= operations
    assert not operations & {"aten::bmm", "aten::_softmax"}


def test_every_output_has_the_width_of_the_values(found: dict[str, Any]) -> None:
    widths = {"heads of 512": 512, "heads of 20": 20, "wider values": 96, "narrower values": 128}
    for name, layer in found["layers"].items():
        assert layer["shape"] == [1, 300, 4, widths.get(name, 64)]


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt2"])
def test_no_layer_makes_the_host_wait(found: dict[str, Any], name: str) -> None:
    # A value that the host wants of a fake tensor is an error, so that none was asked for where the model ran.
    operations = collections.Counter(found["models"][name])
    assert operations["aten::mm"] + operations["aten::addmm"] > 0
    assert not WAITS & set(operations)


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_transformers_makes_no_mask_and_reads_no_positions(kind: str) -> None:
    """On real tensors: transformers reads no values of fake ones."""
    waits: collections.Counter[str] = collections.Counter()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            waits[func._schema.name] += func._schema.name in WAITS
            return func(*args, **(kwargs or {}))

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = AutoConfig.for_model(kind, num_hidden_layers=2, head_dim=16, vocab_size=64, **sizes)
    lm = CausalLM(AutoModelForCausalLM.from_config(config), packed=True)
    dataset = TokenDataset.from_examples([([1] * n, [True] * n) for n in (9, 20)], "waits")
    micro = MicroBatch(index=0, rows=((0, 1),), tokens=29, targets=27, weight=1.0)
    with Watch():
        lm(collate(dataset, micro, packed=True, pad_token_id=0)).backward()
    assert not waits.total()
