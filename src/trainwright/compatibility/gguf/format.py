"""GGUF as a format of weights (``recipe/registries.py``, WEIGHT_FORMATS)."""

from __future__ import annotations

from trainwright.compatibility.gguf.export import export_gguf
from trainwright.compatibility.gguf.reading import convert_gguf, gguf_facts


class Gguf:
    """The functions that the core calls."""

    convert = staticmethod(convert_gguf)
    facts = staticmethod(gguf_facts)
    export = staticmethod(export_gguf)
