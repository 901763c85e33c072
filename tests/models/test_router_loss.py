"""The loss that balances the load of experts, against that of transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.planning.trace import real_step
from tests.support.runs import Runs, difference
from tests.support.small_models import small_config
from tests.support.training import Case, train
from trainwright.data.stream.batch import Batch, collate_examples
from trainwright.data.tokens.dataset import TokenDataset
from trainwright.errors import RequestError
from trainwright.models.causal_lm import CausalLM, RouterLoss, build_router_loss
from trainwright.models.weights import build_empty_model
from trainwright.planning.trace.request import Device, TracedModel, TraceRequest, choose_row_kind
from trainwright.planning.trace.traced import size_model
from trainwright.recipe.loading import load_recipe

FAMILIES = ["mixtral", "qwen3_moe", "olmoe", "granitemoe", "gpt_oss", "phimoe"]
LENGTHS = (9, 3, 14)


def model_of(family: str) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(**{**small_config(family), "model_type": family})
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()


def batch_of(examples: tuple[int, ...], *, packed: bool) -> Batch:
    torch.manual_seed(1)
    rows = [(torch.randint(3, 500, (n,)).tolist(), [i > n // 2 for i in range(n)]) for n in LENGTHS]
    return collate_examples(TokenDataset.from_examples(rows, "x"), examples, packed=packed)


def total(model: Any, batch: Batch, weight: float, *, packed: bool) -> torch.Tensor:
    top = model.config.num_experts_per_tok
    return CausalLM(model, packed=packed, router_loss=RouterLoss(weight, top)).train()(batch)


@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_that_of_transformers_for_each_example(family: str) -> None:
    model = model_of(family)
    ours, theirs = torch.zeros(()), torch.zeros(())
    for example in range(len(LENGTHS)):
        batch = batch_of((example,), packed=False)
        ours = ours + total(model, batch, 0.5, packed=False) - total(model, batch, 0.0, packed=False)
        output = model(input_ids=batch.input_ids, output_router_logits=True, use_cache=False)
        theirs = theirs + 0.5 * output.aux_loss * len(batch.targets)
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-4)
    gate = next(p for name, p in model.named_parameters() if "router" in name or "gate.weight" in name)
    of_ours, of_theirs = (torch.autograd.grad(loss, gate)[0] for loss in (ours, theirs))
    assert torch.allclose(of_ours, of_theirs, rtol=1e-3, atol=1e-6) and of_theirs.abs().max() > 1e-4


def test_a_batch_in_parts_packed_or_padded_has_the_same_loss_and_gradient() -> None:
    gradients: list[tuple[float, torch.Tensor]] = []
    parts = [[(0, 1, 2)], [(0,), (1, 2)], [(0,), (1,), (2,)]]
    for packed in (True, False):
        for division in parts:
            model = model_of("qwen3_moe")
            values = [total(model, batch_of(part, packed=packed), 0.7, packed=packed) for part in division]
            torch.stack(values).sum().backward()
            gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
            gradients.append((sum(values).item(), gradient))
    for value, gradient in gradients[1:]:
        assert value == pytest.approx(gradients[0][0], rel=1e-6)
        assert (gradient - gradients[0][1]).norm() < 1e-5 * gradient.norm()


def test_passes_without_gradients_have_the_plain_loss() -> None:
    model, batch = model_of("mixtral"), batch_of((0, 1), packed=True)
    lm = CausalLM(model, packed=True, router_loss=RouterLoss(0.5, 2))
    plain = CausalLM(model, packed=True)
    with torch.no_grad():
        assert lm(batch).item() == plain(batch).item()


MOE = "model.config={model_type: qwen3_moe, hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 4, "
MOE += "num_key_value_heads: 2, num_experts: 4, num_experts_per_tok: 2, moe_intermediate_size: 16, "
MOE += "decoder_sparse_step: 1, max_position_embeddings: 512, router_aux_loss_coef: 0.25}"
SMALL = ("data.validation=8", "train.max_steps=3", "train.micro_batch_size=2", "train.mixed_precision=no", MOE)


def test_a_run_is_the_same_on_any_number_of_processes_and_resumed(runs: Runs, tmp_path: Path) -> None:
    balanced = ("sft.router_loss=model", *SMALL)
    one = (*balanced, "parallel.strategy=single")
    cases = {part: Case(one, part, str(tmp_path)) for part in (2, None)}
    others = {"one": one, "plain": (*SMALL, "parallel.strategy=single")}
    others["recomputed"] = (*one, "train.activation_checkpointing=full")
    alone = train(runs, {**cases, **{name: Case(overrides) for name, overrides in others.items()}}, 1)
    assert alone[2].column("loss") + alone[None].column("loss") == alone["one"].column("loss")
    assert difference(alone["recomputed"].column("loss"), alone["one"].column("loss")) < 1e-6
    assert alone["one"].metrics()[0] == alone["plain"].metrics()[0]  # evaluations have the plain loss
    # A balanced load has a loss of the number of experts of a token.
    added = alone["one"].column("loss")[0] - alone["plain"].column("loss")[0]
    assert added == pytest.approx(0.25 * 2, rel=0.2)
    spread = {s: Case((*balanced, f"parallel.strategy={s}")) for s in ("ddp", "fsdp")}
    for strategy, trained in train(runs, spread, 2).items():
        assert difference(trained.column("loss"), alone["one"].column("loss")) < 1e-5, strategy


def test_a_model_without_routers_is_refused(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(
        "task: sft\nmodel: {name: x}\ndata: {train: pydoc}\nsft: {router_loss: model}\n"
    )
    recipe = load_recipe(tmp_path / "recipe.yaml")
    llama = build_empty_model(AutoConfig.for_model(**{**small_config("llama"), "model_type": "llama"}))
    with pytest.raises(RequestError, match=r"sft.router_loss: LlamaForCausalLM returns no logits of routers"):
        build_router_loss(recipe, llama)


def test_the_plan_has_the_loss_of_every_layer() -> None:
    configuration = {**small_config("qwen3_moe"), "num_hidden_layers": 6, "num_experts": 64}
    batch = real_step.batch_of((128, 320, 576), True, configuration["vocab_size"])
    shape = real_step.shape_of(batch)
    model = replace(TracedModel.of(configuration), router_loss=True)
    request = TraceRequest(model, Device("cpu", fused=True), "fp32", choose_row_kind(shape), "full")
    plan, real = real_step.planned(size_model(request, shape)), real_step.measured(real_step.real_model(request), batch)
    assert plan["step"] == pytest.approx(real["step"], rel=0.01)
