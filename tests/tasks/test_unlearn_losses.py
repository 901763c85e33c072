"""Every objective's loss and gradient against a plain computation from its formula, document by document in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from trainwright.data.stream.batch import Batch, collate
from trainwright.data.stream.stream import MicroBatch
from trainwright.data.tokens.dataset import TokenDataset
from trainwright.tasks.unlearn.losses import Counts, LossSums, UnlearnLosses, sample_direction, update_multiplier
from trainwright.tasks.unlearn.module import UnlearnLM
from trainwright.tasks.unlearn.section import UnlearnSection
from trainwright.tasks.unlearn.stream import FORGET, REFUSAL, RETAIN

# Of two examples: a forget row, its refusal and a retain row, as (tokens, how many at the end are targets, role).
DOCUMENTS = [
    ([1, 2, 3, 4, 5, 6], 3, FORGET),
    ([1, 2, 3, 7, 8], 2, REFUSAL),
    ([9, 10, 11, 12, 13, 14, 15], 4, RETAIN),
    ([16, 17, 18, 19], 2, FORGET),
    ([16, 17, 20, 21, 22, 23], 4, REFUSAL),
    ([24, 25, 26, 27, 28], 1, RETAIN),
]
LAYER = 1


def tiny(seed: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=2,
        max_position_embeddings=16,
        initializer_range=0.4,
    )
    return LlamaForCausalLM(config).double()


def batch() -> Batch:
    examples = [(tokens, [False] * (len(tokens) - targets) + [True] * targets) for tokens, targets, _ in DOCUMENTS]
    plain = TokenDataset.from_examples(examples, "tiny")
    roles = torch.tensor([role for *_, role in DOCUMENTS], dtype=torch.int8).numpy()
    members = torch.arange(6).reshape(2, 3).numpy()
    dataset = TokenDataset(plain.tokens, plain.targets, plain.offsets, "tiny", members=members, roles=roles)
    micro = MicroBatch(0, ((0,), (1,)), plain.token_count, 16, 2.0)
    return collate(dataset, micro, packed=False, pad_token_id=0)


@dataclass
class Plain:
    """What a formula is made of, document by document: of the model and of the reference."""

    logits: list[torch.Tensor]  # at the targets, [targets, V]
    reference_logits: list[torch.Tensor]
    hidden: list[torch.Tensor]  # of the layer at the targets, [targets, H]
    reference_hidden: list[torch.Tensor]

    @classmethod
    def of(cls, model: nn.Module, reference: nn.Module) -> Plain:
        own, theirs = zip(*(_run(model, document) for document in DOCUMENTS), strict=True)
        with torch.no_grad():
            other, others = zip(*(_run(reference, document) for document in DOCUMENTS), strict=True)
        return cls(list(own), list(other), list(theirs), list(others))

    def those(self, role: int) -> list[int]:
        return [index for index, (*_, its) in enumerate(DOCUMENTS) if its == role]

    def nll(self, index: int, of_reference: bool = False) -> torch.Tensor:
        logits = (self.reference_logits if of_reference else self.logits)[index]
        tokens, targets, _ = DOCUMENTS[index]
        return -logits.log_softmax(1)[range(targets), tokens[-targets:]]

    def ratio(self, index: int) -> torch.Tensor:
        return self.nll(index, of_reference=True).sum() - self.nll(index).sum()

    def tokens(self, role: int, loss: Callable[[int], torch.Tensor]) -> torch.Tensor:
        """The mean over all tokens of the documents with ``role``."""
        return torch.cat([loss(index) for index in self.those(role)]).mean()

    def answers(self, role: int, loss: Callable[[int], torch.Tensor]) -> torch.Tensor:
        """The mean over the documents with ``role``."""
        return torch.stack([loss(index) for index in self.those(role)]).mean()


def _run(model: nn.Module, document: tuple[list[int], int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, targets, _ = document
    output = model(input_ids=torch.tensor([tokens]), output_hidden_states=True)
    return output.logits[0, -targets - 1 : -1], output.hidden_states[LAYER + 1][0, -targets:]


def _npo(p: Plain, beta: float) -> torch.Tensor:
    return p.answers(FORGET, lambda i: 2 / beta * (1 + (p.ratio(i) * beta).exp()).log())


def _simnpo(p: Plain, beta: float, delta: float) -> torch.Tensor:
    return p.answers(FORGET, lambda i: -2 / beta * torch.sigmoid(beta * (p.nll(i).mean() - delta)).log())


def _dpo(p: Plain, beta: float) -> torch.Tensor:
    return p.answers(FORGET, lambda i: -2 / beta * torch.sigmoid(beta * (p.ratio(i + 1) - p.ratio(i))).log())


def _wga(p: Plain, beta: float) -> torch.Tensor:
    return p.tokens(FORGET, lambda i: -((-p.nll(i)).exp().detach() ** beta) * p.nll(i))


def _satimp(p: Plain, beta: float, importance: float) -> torch.Tensor:
    def loss(i: int) -> torch.Tensor:
        chance = (-p.nll(i)).exp().detach()
        return -(chance**beta) * (1 - chance) ** importance * p.nll(i)

    return p.tokens(FORGET, loss)


def _undial(p: Plain, beta: float) -> torch.Tensor:
    def loss(i: int) -> torch.Tensor:
        tokens, targets, _ = DOCUMENTS[i]
        lowered = p.reference_logits[i] - beta * torch.eye(32, dtype=torch.float64)[tokens[-targets:]]
        return -(lowered.softmax(1) * p.logits[i].log_softmax(1)).sum(1)

    return p.tokens(FORGET, loss)


def _ce_u(p: Plain, skip: int) -> torch.Tensor:
    def loss(i: int) -> torch.Tensor:
        tokens, targets, _ = DOCUMENTS[i]
        aim = p.logits[i].detach().clone()
        aim[range(targets), tokens[-targets:]] = -torch.inf
        return -(aim.softmax(1) * p.logits[i].log_softmax(1)).sum(1)[skip:]

    return p.tokens(FORGET, loss)


def _rmu(p: Plain, coefficient: float) -> torch.Tensor:
    wanted = sample_direction(16, coefficient, 3).double()
    assert float(wanted.norm()) == pytest.approx(coefficient)
    return p.answers(FORGET, lambda i: ((p.hidden[i] - wanted) ** 2).mean())


def _nll(p: Plain) -> torch.Tensor:
    return p.tokens(RETAIN, p.nll)


def _kl(p: Plain) -> torch.Tensor:
    def loss(i: int) -> torch.Tensor:
        expected, found = p.reference_logits[i].log_softmax(1), p.logits[i].log_softmax(1)
        return (expected.exp() * (expected - found)).sum(1)

    return p.tokens(RETAIN, loss)


def _held(p: Plain) -> torch.Tensor:
    return p.answers(RETAIN, lambda i: ((p.hidden[i] - p.reference_hidden[i]) ** 2).mean())


# What is written in the recipe, and the loss that is meant by it.
CASES: dict[str, tuple[dict[str, Any], Callable[[Plain], torch.Tensor]]] = {
    "grad_ascent": ({}, lambda p: -p.tokens(FORGET, p.nll)),
    "grad_diff": ({"gamma": 0.5, "alpha": 2.0}, lambda p: -0.5 * p.tokens(FORGET, p.nll) + 2 * _nll(p)),
    "grad_diff with kl": (
        {"objective": "grad_diff", "retain_loss": "kl"},
        lambda p: -p.tokens(FORGET, p.nll) + _kl(p),
    ),
    "npo": ({}, lambda p: _npo(p, 0.1) + _nll(p)),
    "npo with kl": ({"objective": "npo", "beta": 0.3, "retain_loss": "kl"}, lambda p: _npo(p, 0.3) + _kl(p)),
    "simnpo": ({"delta": 0.2}, lambda p: 0.125 * _simnpo(p, 4.5, 0.2) + _nll(p)),
    "dpo": ({}, lambda p: _dpo(p, 0.1) + _nll(p)),
    "altpo": ({"beta": 0.3, "alpha": 2.0}, lambda p: _dpo(p, 0.3) + 2 * _nll(p)),
    "idk_nll": ({}, lambda p: p.tokens(REFUSAL, p.nll) + _nll(p)),
    "undial": ({"alpha": 0.5}, lambda p: _undial(p, 10.0) + 0.5 * _nll(p)),
    "undial with kl": (
        {"objective": "undial", "beta": 2.0, "alpha": 1.0, "retain_loss": "kl"},
        lambda p: _undial(p, 2.0) + _kl(p),
    ),
    "wga": ({"beta": 2.0}, lambda p: _wga(p, 2.0) + _nll(p)),
    "satimp": ({}, lambda p: 0.1 * _satimp(p, 5.0, 1.0) + _nll(p)),
    "ce_u": ({"alpha": 1.0}, lambda p: _ce_u(p, 1) + _nll(p)),
    "pdu": (
        {"retain_limit": 2.0},
        lambda p: p.tokens(FORGET, lambda i: (p.logits[i].max(1).values - p.logits[i].mean(1)) ** 2) + _nll(p),
    ),
    "rmu": ({"layer": LAYER, "steering_coefficient": 6.0}, lambda p: _rmu(p, 6.0) + _held(p)),
    "rmu with nll": ({"objective": "rmu", "layer": LAYER, "retain_loss": "nll"}, lambda p: _rmu(p, 2.0) + _nll(p)),
    "rmu with kl": ({"objective": "rmu", "layer": LAYER, "retain_loss": "kl"}, lambda p: _rmu(p, 2.0) + _kl(p)),
    "task_vector": ({}, lambda p: p.tokens(FORGET, p.nll)),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_are_those_of_the_formula(case: str) -> None:
    written, meant = CASES[case]
    section = UnlearnSection(**{"objective": case, **written})
    model, frozen = tiny(1), tiny(2).requires_grad_(False)
    alone = copy.deepcopy(model)
    layer = LAYER if section.objective == "rmu" else None
    lm = UnlearnLM(model, packed=False, reference=UnlearnLM(frozen, packed=False, layer=layer).eval(), layer=layer)  # type: ignore[arg-type]
    plain = Plain.of(alone, frozen)
    expected = meant(plain)
    expected.backward()

    tensors, found = batch(), LossSums()
    reference = torch.stack([-plain.nll(index, of_reference=True).sum() for index in range(len(DOCUMENTS))])
    counts = Counts.of(section, list(zip(tensors.roles, tensors.target_counts, strict=True)))
    factors = section.value("gamma") / counts.forget, section.value("alpha") / counts.retain
    losses = UnlearnLosses(
        section, lambda batch: reference, sample_direction(16, section.value("steering_coefficient") or 1.0, 3)
    )
    total = lm(tensors, work=lambda lm, batch: losses(lm, batch, *factors, found))
    total.backward()

    assert float(total) == pytest.approx(float(expected), abs=1e-6)
    for (name, one), other in zip(model.named_parameters(), alone.parameters(), strict=True):
        wanted = torch.zeros_like(other) if other.grad is None else other.grad
        got = torch.zeros_like(one) if one.grad is None else one.grad
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
    assert any(float(other.grad.abs().max()) > 1e-3 for other in alone.parameters() if other.grad is not None)
    means = [section.value("gamma") * float(found.forget) / counts.forget]
    means.append(section.value("alpha") * float(found.retain) / counts.retain)
    assert sum(means) == pytest.approx(float(expected), abs=1e-6)


def test_the_retain_loss_counts_more_the_more_it_is_over_its_limit() -> None:
    assert update_multiplier(1.0, 3.5, 3.0, 0.5) == 1.25
    assert update_multiplier(0.2, 2.0, 3.0, 0.5) == 0.0
