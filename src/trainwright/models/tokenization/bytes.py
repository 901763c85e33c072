"""The built-in tokenizer: one token per byte. It needs no files and no download, and any text round-trips."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainwright.data.rows.chat_templates import CHATML

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD_TOKEN = "<|pad|>"
START_TOKEN = "<|im_start|>"
END_TOKEN = "<|im_end|>"


def bytes_tokenizer() -> PreTrainedTokenizerFast:
    """Build the byte-level tokenizer: ids 0-255 are bytes, 256 is padding, 257 and 258 open and close a turn.

    The length is 259. ``<|im_end|>`` is the end-of-sequence token; there is no beginning-of-sequence token and no
    unknown token, because every byte has an id. The ids are the same in every process and version.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {letter: byte for byte, letter in enumerate(byte_letters())}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    # Without the regex the text is not split, which gives the same tokens faster.
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, normalized=False) for t in (PAD_TOKEN, START_TOKEN, END_TOKEN)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD_TOKEN,
        eos_token=END_TOKEN,
        additional_special_tokens=[START_TOKEN],
        chat_template=CHATML,
        clean_up_tokenization_spaces=False,
    )


def byte_letters() -> list[str]:
    """Return the printable character for each byte 0-255 in a byte-level vocabulary.

    Printable Latin-1 bytes represent themselves and the others map to U+0100 and up, in order, as in GPT-2's
    ``bytes_to_unicode`` (https://github.com/openai/gpt-2/blob/master/src/encoder.py).
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    letters, spare = [], 0x100
    for byte in range(256):
        letters.append(chr(byte if byte in printable else spare))
        spare += byte not in printable
    return letters
