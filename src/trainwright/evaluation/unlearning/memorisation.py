"""How much of a text a model has by heart, from which of its tokens are the likeliest ones after those before."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Bools = npt.NDArray[np.bool_]


def exact_memorisation(correct: Bools) -> float:
    """Share of the tokens that are the likeliest after those before (Tirumala et al., arXiv 2205.10770)."""
    return float(correct.mean()) if len(correct) else 0.0


def extraction_strength(correct: Bools) -> float:
    """Share of the tokens at the end that come out right when all before them is given: 1 - k / n for the smallest k
    from which on every token is the likeliest one (Carlini et al., arXiv 2012.07805; as in arXiv 2406.09179)."""
    wrong = np.flatnonzero(~correct)
    return 1.0 - (int(wrong[-1]) + 1) / len(correct) if len(wrong) else float(len(correct) > 0)
