"""How much of a text a model has memorized, from which of its tokens are the most probable ones after their prefix."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Bools = npt.NDArray[np.bool_]


def exact_memorisation(correct: Bools) -> float:
    """Return the fraction of tokens that are the most probable ones after their prefix (Tirumala et al., arXiv
    2205.10770).
    """
    return float(correct.mean()) if len(correct) else 0.0


def extraction_strength(correct: Bools) -> float:
    """Return the fraction of tokens at the end that are predicted right given their prefix: 1 - k / n for the smallest
    k from which on every token is the most probable one (Carlini et al., arXiv 2012.07805; as in arXiv 2406.09179).
    """
    wrong = np.flatnonzero(~correct)
    return 1.0 - (int(wrong[-1]) + 1) / len(correct) if len(wrong) else float(len(correct) > 0)
