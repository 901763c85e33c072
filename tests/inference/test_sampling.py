"""What a number of [0, 1) makes of logits."""

from __future__ import annotations

import math
from collections import Counter

import torch

from trainwright.inference.generation import Sampler, Sampling

# Probabilities 0.5, 0.25, 0.15, 0.1, in another order.
LOGITS = torch.tensor([math.log(0.15), math.log(0.5), math.log(0.1), math.log(0.25)])
DRAWS = 4000


def drawn(sampling: Sampling) -> Counter[int]:
    choose = Sampler(sampling, range(DRAWS))
    return Counter(choose(LOGITS.expand(DRAWS, -1), 0, range(DRAWS)).tolist())


def close(count: int, probability: float) -> bool:
    """Within four standard deviations of what is to be expected."""
    return abs(count - DRAWS * probability) < 4 * math.sqrt(DRAWS * probability * (1 - probability))


def test_tokens_come_as_often_as_they_are_likely() -> None:
    found = drawn(Sampling(max_new_tokens=1, temperature=1.0))
    assert all(close(found[token], p) for token, p in enumerate((0.15, 0.5, 0.1, 0.25)))


def test_temperature_sharpens() -> None:
    squares = [p * p for p in (0.15, 0.5, 0.1, 0.25)]
    found = drawn(Sampling(max_new_tokens=1, temperature=0.5))
    assert all(close(found[token], square / sum(squares)) for token, square in enumerate(squares))


def test_top_p_keeps_the_smallest_set_that_has_so_much() -> None:
    found = drawn(Sampling(max_new_tokens=1, temperature=1.0, top_p=0.7))
    assert set(found) == {1, 3} and close(found[1], 2 / 3)
    assert set(drawn(Sampling(max_new_tokens=1, temperature=1.0, top_p=0.5))) == {1}
    assert set(drawn(Sampling(max_new_tokens=1, temperature=1.0, top_p=0.76))) == {0, 1, 3}


def test_top_k_keeps_so_many() -> None:
    found = drawn(Sampling(max_new_tokens=1, temperature=1.0, top_k=3))
    assert set(found) == {0, 1, 3} and close(found[1], 0.5 / 0.9)


def test_without_temperature_it_is_the_likeliest() -> None:
    assert Sampler(Sampling(), range(3))(LOGITS.expand(3, -1), 0, range(3)).tolist() == [1, 1, 1]


def test_every_step_of_every_example_draws_anew() -> None:
    choose = Sampler(Sampling(max_new_tokens=50, temperature=1.0), [7, 8])
    rows = torch.tensor([choose(LOGITS.expand(2, -1), step, [0, 1]).tolist() for step in range(50)])
    assert len(set(rows[:, 0].tolist())) == 4 and rows[:, 0].tolist() != rows[:, 1].tolist()
    again = Sampler(Sampling(max_new_tokens=50, temperature=1.0), [8])
    assert [again(LOGITS[None], step, [0]).item() for step in range(50)] == rows[:, 1].tolist()
