"""Tokenised examples on disk, mapped into memory by every worker.

A dataset directory holds three flat arrays and a small JSON file:

    tokens.npy    int32  [total]      all examples one after another
    targets.npy   bool   [total]      True where the token is to be predicted
    offsets.npy   int64  [examples+1] where each example begins
    dataset.json  fingerprint and report
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class TokenDataset:
    """Examples as flat arrays; ``report`` carries whatever the preparation counted."""

    tokens: npt.NDArray[np.int32]
    targets: npt.NDArray[np.bool_]
    offsets: npt.NDArray[np.int64]
    fingerprint: str
    report: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def length(self, index: int) -> int:
        """Number of tokens of one example."""
        return int(self.offsets[index + 1] - self.offsets[index])

    def example(self, index: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
        """``(tokens [length], targets [length])`` of one example."""
        begin, end = int(self.offsets[index]), int(self.offsets[index + 1])
        return self.tokens[begin:end], self.targets[begin:end]

    def target_count(self, index: int) -> int:
        """Targets of one example; its first token has nothing before it and is never one."""
        begin, end = int(self.offsets[index]), int(self.offsets[index + 1])
        return int(np.count_nonzero(self.targets[begin + 1 : end]))

    @property
    def token_count(self) -> int:
        return int(self.offsets[-1])

    @classmethod
    def from_examples(
        cls,
        examples: Iterable[tuple[list[int], list[bool]]],
        fingerprint: str,
        report: dict[str, Any] | None = None,
    ) -> TokenDataset:
        """Join ``(tokens, targets)`` pairs into one dataset held in memory."""
        tokens: list[npt.NDArray[np.int32]] = []
        targets: list[npt.NDArray[np.bool_]] = []
        offsets = [0]
        for ids, flags in examples:
            tokens.append(np.asarray(ids, dtype=np.int32))
            targets.append(np.asarray(flags, dtype=np.bool_))
            offsets.append(offsets[-1] + len(ids))
        return cls(
            np.concatenate(tokens) if tokens else np.zeros(0, np.int32),
            np.concatenate(targets) if targets else np.zeros(0, np.bool_),
            np.asarray(offsets, dtype=np.int64),
            fingerprint,
            report or {},
        )

    def save(self, directory: Path) -> None:
        """Write to ``directory`` so that it is there whole or not at all."""
        scratch = directory.with_name(f"{directory.name}.tmp-{os.getpid()}")
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        for name in ("tokens", "targets", "offsets"):
            np.save(scratch / f"{name}.npy", getattr(self, name))
        about = {"fingerprint": self.fingerprint, "report": self.report}
        (scratch / "dataset.json").write_text(json.dumps(about))
        shutil.rmtree(directory, ignore_errors=True)
        scratch.rename(directory)

    @classmethod
    def open(cls, directory: Path) -> TokenDataset:
        """Map a saved dataset; pages are read as they are needed and shared between processes."""
        about = json.loads((directory / "dataset.json").read_text())
        arrays = [np.load(directory / f"{name}.npy", mmap_mode="r") for name in ("tokens", "targets", "offsets")]
        return cls(arrays[0], arrays[1], np.asarray(arrays[2]), about["fingerprint"], about["report"])
