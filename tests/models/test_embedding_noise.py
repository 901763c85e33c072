"""The noise of NEFTune: as in transformers for a sequence alone, and by the length of each sequence of a pack."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.runs import Runs, difference
from tests.support.slow import slow_but
from tests.support.training import Case, train
from trainwright.data.stream.batch import Batch
from trainwright.inference.loading import probe
from trainwright.models.causal_lm import CausalLM

SMALL = ("data.validation=8", "train.max_steps=4", "train.micro_batch_size=1", "train.mixed_precision=no")
SMALL += ("model.dropout=0", "train.neftune_noise_alpha=5")


def model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=50, num_attention_heads=2, num_key_value_heads=2, **sizes))


def embedded(lm: CausalLM, batch: Batch) -> torch.Tensor:
    """What the first block is given."""
    seen: list[torch.Tensor] = []
    handle = lm.blocks()[0].register_forward_pre_hook(
        lambda module, args, kwargs: seen.append((args or (kwargs["hidden_states"],))[0]), with_kwargs=True
    )
    torch.manual_seed(7)
    lm(batch)
    handle.remove()
    return seen[0].detach()


def alone(batch: Batch, length: int) -> Batch:
    return replace(
        batch,
        input_ids=batch.input_ids[:, :length],
        position_ids=batch.position_ids[:, :length],
        lengths=(length,),
        boundaries=None,
        target_index=batch.target_index[: length - 1],
        targets=batch.targets[: length - 1],
    )


def test_a_sequence_alone_has_the_noise_of_transformers() -> None:
    from transformers.integrations.neftune import neftune_post_forward_hook

    theirs = model().get_input_embeddings().train()
    theirs.neftune_noise_alpha = 5.0
    batch = alone(probe(50), 5)
    torch.manual_seed(7)
    expected = neftune_post_forward_hook(theirs, None, theirs(batch.input_ids))
    lm = CausalLM(model(), packed=False).train()
    lm.embedding_noise = 5.0
    torch.testing.assert_close(embedded(lm, batch), expected, rtol=1e-5, atol=1e-6)


def test_sequences_of_a_pack_have_noise_by_their_own_lengths() -> None:
    lm, batch = CausalLM(model(), packed=True).train(), probe(50)
    lm.embedding_noise = 0.0
    plain = embedded(lm, batch)
    lm.embedding_noise = 5.0
    noise = (embedded(lm, batch) - plain)[0]
    torch.manual_seed(7)
    uniform = torch.empty(1, 12, 16).uniform_(-1, 1)[0]
    sizes = torch.tensor([5 / (length * 16) ** 0.5 for length in batch.lengths for _ in range(length)])
    torch.testing.assert_close(noise, uniform * sizes[:, None], rtol=1e-4, atol=1e-6)


def test_no_pass_without_training_has_noise() -> None:
    lm, batch = CausalLM(model(), packed=True), probe(50)
    lm.embedding_noise = 5.0
    with torch.no_grad():
        first = embedded(lm.train(), batch)
    torch.testing.assert_close(first, embedded(lm.eval(), batch))


@pytest.mark.parametrize("strategies", slow_but(("ddp", "fsdp"), among=(("ddp", "fsdp"), ("zero2", "zero3"))))
def test_runs_have_the_same_noise_on_any_number_of_processes(runs: Runs, strategies: tuple[str, ...]) -> None:
    if "zero2" in strategies:
        pytest.importorskip("deepspeed")
    cases = {
        "one": Case((*SMALL, "parallel.strategy=single")),
        "none": Case((*SMALL, "parallel.strategy=single", "train.neftune_noise_alpha=null")),
    }
    found = train(runs, cases, 1)
    one = found["one"]
    assert difference(one.column("loss"), found["none"].column("loss")) > 1e-4
    assert one.metrics()[0] == found["none"].metrics()[0]
    for strategy, trained in train(runs, {s: Case((*SMALL, f"parallel.strategy={s}")) for s in strategies}, 2).items():
        assert difference(trained.column("loss"), one.column("loss")) < 1e-5, strategy


@pytest.mark.slow
def test_a_resumed_run_has_the_same_noise(runs: Runs, tmp_path: Any) -> None:
    settings = (*SMALL, "parallel.strategy=single")
    cases = {part: Case(settings, part, str(tmp_path)) for part in (2, None)}
    found = train(runs, {**cases, "whole": Case(settings)}, 1)
    assert found[2].column("loss") + found[None].column("loss") == found["whole"].column("loss")
