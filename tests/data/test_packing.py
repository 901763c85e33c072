from __future__ import annotations

import random

import pytest

from trainwright.data.tokens.packing import best_fit_decreasing


@pytest.mark.parametrize("seed", range(20))
def test_every_example_is_in_exactly_one_pack_that_holds_it(seed: int) -> None:
    generator = random.Random(seed)
    lengths = [generator.randint(1, 100) for _ in range(generator.randint(0, 60))]
    packs = best_fit_decreasing(lengths, 100)
    assert sorted(index for pack in packs for index in pack) == list(range(len(lengths)))
    assert all(sum(lengths[index] for index in pack) <= 100 for pack in packs)
    # At most 11/9 of the optimum, which is no less than the tokens divided by the capacity.
    assert len(packs) <= 11 / 9 * -(-sum(lengths) // 100) + 1 or max(lengths) > 50


def test_an_example_goes_into_the_fullest_pack_that_takes_it() -> None:
    assert best_fit_decreasing([5, 7, 3, 2, 4], 10) == [[1, 2], [0, 4], [3]]


def test_an_example_longer_than_a_pack_is_refused() -> None:
    with pytest.raises(ValueError, match="11 tokens"):
        best_fit_decreasing([3, 11], 10)
