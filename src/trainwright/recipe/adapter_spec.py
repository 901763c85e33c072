"""What recipes and the models need to know of a kind of adapter, without torch.

Kinds are registered in ``recipe/registries.py``, by an entry point of the group ``trainwright.adapters``, or named in a
recipe as ``module:Name``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class AdapterSpec:
    """A kind of adapter of PEFT.

    Attributes:
        summary: one line for the documentation of the key.
        settings: place ``module:function`` of a function that gets the recipe's section, the model and what settings of
            all kinds have in common as keywords, and returns a ``peft.PeftConfig``.
        reads: which of the keys of some kinds alone (`OPTIONAL`) have an effect.
        unchanged: by a part of their names, the value of the parameters that make a new adapter change nothing.
        of_ends: whether embeddings and the output head can be adapted.
        peft_type: PEFT's name, in the files of adapters.
    """

    summary: str
    settings: str
    reads: tuple[str, ...]
    unchanged: Mapping[str, float]
    of_ends: bool = False
    peft_type: str = "LORA"


OPTIONAL = (
    *("rank", "alpha", "rank_stabilized", "dropout", "initialization", "target_parameters", "stack", "block_size"),
)
_LORA = ("rank", "alpha", "rank_stabilized", "dropout", "initialization", "target_parameters", "stack")
# Of the two matrices of a module, the one that is initially zero; in PEFT, embeddings begin with the other one.
_ZEROS = {".lora_B.": 0.0, ".lora_embedding_A": 0.0}

LORA = AdapterSpec(
    summary="lora: low-rank matrices added to frozen weights (arXiv 2106.09685)",
    settings="trainwright.models.adapters.config:build_lora_config",
    reads=_LORA,
    unchanged=_ZEROS,
    of_ends=True,
)
DORA = AdapterSpec(
    summary="dora: also the magnitudes of the weights (arXiv 2402.09353)",
    settings="trainwright.models.adapters.config:build_lora_config",
    reads=_LORA,
    unchanged=_ZEROS,
)
OFT = AdapterSpec(
    summary="oft: rotations of the inputs, in blocks (arXiv 2306.07280; inverted as a series, arXiv 2506.19847)",
    settings="trainwright.models.adapters.config:build_oft_config",
    reads=("block_size",),
    unchanged={".oft_R.": 0.0},
    peft_type="OFT",
)
