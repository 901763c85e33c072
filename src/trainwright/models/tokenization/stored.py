"""Load the tokenizer in a directory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from trainwright.errors import RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


def tokenizer_from(directory: Path, key: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer in ``directory``; raise RequestError, naming the recipe key ``key``, if it fails."""
    from transformers import AutoTokenizer

    hint = "" if key == "model.tokenizer" else '; set model.tokenizer ("bytes", an id or a directory)'
    if not any((directory / file).exists() for file in TOKENIZER_FILES):
        pickles = ", ".join(sorted(file.name for file in directory.glob("*.pkl")))
        why = f"; its tokenizer is a pickle ({pickles}), which can run any code when loaded" if pickles else ""
        raise RequestError(f"{key}: {directory} has no tokenizer ({', '.join(TOKENIZER_FILES)}){why}{hint}")
    try:
        return AutoTokenizer.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # as above: no common base class
        reason = " ".join(str(error).split())
        raise RequestError(f"{key}: the tokenizer in {directory} cannot be loaded: {reason}{hint}") from error
