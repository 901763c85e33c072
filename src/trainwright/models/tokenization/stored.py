"""Load the tokenizer in a directory."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from trainwright.errors import RequestError
from trainwright.models.supported import class_in

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
    if class_in(directory) is not None:
        from trainwright.models.own.model import register

        register()  # transformers also reads the configuration
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
        template = tokenizer.chat_template
        if not all(
            isinstance(one, str) for one in (template.values() if isinstance(template, dict) else [template or ""])
        ):
            raise TypeError("its chat_template is not a text")
        return tokenizer
    except Exception as error:  # as above: no common base class
        if _needs_sentencepiece(directory):
            raise RequestError(
                f"{key}: {directory} has only tokenizer.model, which is read with the package sentencepiece, and that "
                "is not installed: pip install sentencepiece protobuf, or save the tokenizer there as tokenizer.json"
            ) from error
        reason = " ".join(str(error).split())
        raise RequestError(f"{key}: the tokenizer in {directory} cannot be loaded: {reason}{hint}") from error


def _needs_sentencepiece(directory: Path) -> bool:
    """Return whether the only tokenizer in a directory is a SentencePiece model that cannot be read here."""
    file = directory / "tokenizer.model"
    if (directory / "tokenizer.json").exists() or not file.exists() or find_spec("sentencepiece") is not None:
        return False
    with file.open("rb") as opened:
        return opened.read(1) == b"\n"  # the first field of its protocol buffer; files of tiktoken are lines of base64
