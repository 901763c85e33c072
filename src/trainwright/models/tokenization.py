"""Tokenizers: loaded from a directory, or made here; and the tokens that end an answer.

A recipe names one that is trained on its text as ``characters:SOURCE`` or ``bpe:SIZE:SOURCE`` (byte-level BPE, Sennrich
et al., arXiv 1508.07909), which is built once and cached, or the built-in one as ``bytes``. The token that ends an
answer is the one that a chat template teaches.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainwright.data.rows.chat_encoding import ChatEncoder, encode_messages
from trainwright.data.rows.chat_templates import read_template
from trainwright.data.rows.texts import SEPARATOR, iterate_pieces
from trainwright.data.sources.shards import is_shards
from trainwright.errors import RequestError
from trainwright.machine.cache import explain_cache_errors, find_cache_root
from trainwright.machine.sharing import build_once
from trainwright.models.supported import read_class_name
from trainwright.recipe.sections.data import SourceSection

if TYPE_CHECKING:
    from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast


def turn_end(tokenizer: PreTrainedTokenizerBase) -> tuple[int | None, str]:
    """Return the token that ends a turn in this chat template; if it is not a single token, the text that does."""
    if not tokenizer.added_tokens_decoder:  # without special tokens, a text of the template's is all there can be
        return None, ChatEncoder(tokenizer).stop
    ids, targets = encode_messages(tokenizer, [_turn("user", "a"), _turn("assistant", "b")])
    target_tokens = [token for token, is_target in zip(ids, targets, strict=True) if is_target]
    if target_tokens[-1] in tokenizer.all_special_ids or target_tokens[-1] in tokenizer.added_tokens_decoder:
        return target_tokens[-1], ""
    return None, str(tokenizer.decode(target_tokens)).rpartition("b")[2].rstrip(" ")


def _turn(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def list_token_ids(value: int | list[int] | None) -> list[int]:
    """Return the ids in a setting that holds one id, several or none."""
    if value is None:
        return []
    return [int(token) for token in value] if isinstance(value, (list, tuple)) else [int(value)]


def end_texts_at_turns(
    tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig, generation: GenerationConfig | None
) -> tuple[PreTrainedTokenizerBase, PretrainedConfig, GenerationConfig | None]:
    """Return copies in which the token that ends a turn in the chat template is the end of a text.

    Other programs stop at the tokens that these three name. Generation also still stops at the earlier ones, and the
    template renders as before, even if it writes ``eos_token``. If a turn does not end with a single token, nothing
    changes.
    """
    from transformers import GenerationConfig

    stop, _ = turn_end(tokenizer)
    if stop is None:
        return tokenizer, config, generation
    settings = generation if generation is not None else GenerationConfig.from_model_config(config)
    # If a generation config is marked as derived from the model's config, transformers derives it again.
    values = {key: value for key, value in settings.to_dict().items() if key != "_from_model_config"}
    stopping = GenerationConfig.from_dict(values)
    earlier = [
        *list_token_ids(stopping.eos_token_id),
        *list_token_ids(config.eos_token_id),
        *list_token_ids(tokenizer.eos_token_id),
    ]
    stops = list(dict.fromkeys([stop, *earlier]))
    stopping.eos_token_id = stops[0] if len(stops) == 1 else stops
    config = copy.deepcopy(config)
    if stop not in list_token_ids(config.eos_token_id):
        config.eos_token_id = stop
    if tokenizer.eos_token_id != stop:
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.chat_template = _fill_eos_token(tokenizer.chat_template, tokenizer.eos_token or "")
        tokenizer.eos_token = tokenizer.added_tokens_decoder[stop]
    return tokenizer, config, stopping


def _fill_eos_token(template: Any, token: str) -> Any:
    """Return a chat template, or several by name, in which ``eos_token`` remains ``token``."""
    if isinstance(template, dict):
        return {name: _fill_eos_token(text, token) for name, text in template.items()}
    if not isinstance(template, str) or "eos_token" not in template:
        return template
    # Templates are rendered with trim_blocks, which removes the line end after a block, and nothing else.
    return f"{{%- set eos_token = {json.dumps(token, ensure_ascii=False)} %}}\n{template}"


TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


def load_tokenizer_from(directory: Path, key: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer in ``directory``; raise RequestError, naming the recipe key ``key``, if it fails."""
    from transformers import AutoTokenizer

    hint = "" if key == "model.tokenizer" else '; set model.tokenizer ("bytes", an id or a directory)'
    if not any((directory / file).exists() for file in TOKENIZER_FILES):
        pickles = ", ".join(sorted(file.name for file in directory.glob("*.pkl")))
        why = f"; its tokenizer is a pickle ({pickles}), which can run any code when loaded" if pickles else ""
        raise RequestError(f"{key}: {directory} has no tokenizer ({', '.join(TOKENIZER_FILES)}){why}{hint}")
    if read_class_name(directory) is not None:
        from trainwright.models.own_module import register

        register()  # transformers also reads the configuration
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
        template = tokenizer.chat_template
        if not all(
            isinstance(text, str) for text in (template.values() if isinstance(template, dict) else [template or ""])
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
    with file.open("rb") as stream:
        return stream.read(1) == b"\n"  # the first field of its protocol buffer; files of tiktoken are lines of base64


_BYTES = 256
_VERSION = 1


def is_trained(name: str) -> bool:
    """Return whether a recipe's tokenizer name is one of these."""
    return name == "characters" or name.startswith(("characters:", "bpe:"))


def load_trained_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """Return the tokenizer ``characters:SOURCE`` or ``bpe:SIZE:SOURCE``, from the cache or newly built.

    Raises:
        RequestError: the name has another form, or the source is missing or not text.
        MachineError: the cache cannot be read or written.
    """
    from transformers import PreTrainedTokenizerFast

    from trainwright.data.sources.key import read_file_states

    key = "model.tokenizer"
    size, source = _parse_name(name, key)
    cache_key = json.dumps([_VERSION, size, read_file_states(source, key)], default=str)
    directory = find_cache_root() / "tokenizers" / hashlib.sha256(cache_key.encode()).hexdigest()[:32]

    def find() -> PreTrainedTokenizerFast | None:
        if not (directory / "tokenizer.json").exists():
            return None
        return PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True)

    with explain_cache_errors(directory):
        tokenizer = build_once(
            directory, find, lambda path: make_tokenizer([(source, key)], size).save_pretrained(path)
        )
    tokenizer.name_or_path = name
    return tokenizer


def make_tokenizer(sources: Iterable[tuple[SourceSection, str]], size: int | None) -> PreTrainedTokenizerFast:
    """Train a tokenizer on texts: byte-level BPE with ``size`` tokens, or one token per character if ``size`` is None.

    Args:
        sources: pairs of a source and the key that names it in messages.
    """
    texts = (piece.text for source, key in sources for piece in iterate_pieces(source, key))
    return _build_character_tokenizer(texts) if size is None else _train_bpe(texts, size)


def _parse_name(name: str, key: str) -> tuple[int | None, SourceSection]:
    kind, _, rest = name.partition(":")
    size: int | None = None
    if kind == "bpe":
        number, _, rest = rest.partition(":")
        if not number.isdigit() or int(number) <= _BYTES:
            raise RequestError(f"{key}: {name}: bpe:SIZE:SOURCE has a size of more than {_BYTES} tokens")
        size = int(number)
    if not rest:
        raise RequestError(f"{key}: {name}: needs a text to train on; use {name.rstrip(':')}:FILE")
    if is_shards(rest):
        raise RequestError(
            f"{key}: {name}: {rest} is already tokenized; use the original text, or the tokenizer's directory"
        )
    return size, SourceSection(source=rest)


def _build_character_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Return a tokenizer whose only tokens are the characters of the texts, sorted by code point."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    characters: set[str] = set()
    for text in texts:
        characters.update(text)
    backend = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(sorted(characters))}, merges=[]))
    backend.decoder = decoders.Fuse()
    # This setting makes unknown characters an error; otherwise they would be dropped.
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, characters=True)


def _train_bpe(texts: Iterable[str], size: int) -> PreTrainedTokenizerFast:
    """Return a BPE tokenizer with the word pattern and the end-of-text token of GPT-2."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[SEPARATOR],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=SEPARATOR, pad_token=SEPARATOR, clean_up_tokenization_spaces=False
    )


PAD_TOKEN = "<|pad|>"
START_TOKEN = "<|im_start|>"
END_TOKEN = "<|im_end|>"


def build_bytes_tokenizer() -> PreTrainedTokenizerFast:
    """Build the byte-level tokenizer: ids 0-255 are bytes, 256 is padding, 257 and 258 open and close a turn.

    The length is 259. ``<|im_end|>`` is the end-of-sequence token; there is no beginning-of-sequence token and no
    unknown token, because every byte has an id. The ids are the same in every process and version.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    vocabulary = {letter: byte for byte, letter in bytes_to_unicode().items()}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    # Without the regex the text is not split, which gives the same tokens faster.
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, normalized=False) for t in (PAD_TOKEN, START_TOKEN, END_TOKEN)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD_TOKEN,
        eos_token=END_TOKEN,
        additional_special_tokens=[START_TOKEN],
        chat_template=read_template("chatml"),
        clean_up_tokenization_spaces=False,
    )
    tokenizer.name_or_path = "bytes"  # for messages; it is not saved
    return tokenizer
