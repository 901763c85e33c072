from __future__ import annotations

from pathlib import Path

import numpy as np

from trainwright.data.tokens.dataset import TokenDataset


def test_a_saved_dataset_is_mapped_back_unchanged(tmp_path: Path) -> None:
    pairs = [([1, 2, 3], [False, True, True]), ([4], [True]), ([5, 6], [True, False])]
    data = TokenDataset.from_examples(pairs, "print", {"rows": 3})
    data.save(tmp_path / "cache")
    opened = TokenDataset.open(tmp_path / "cache")
    assert isinstance(opened.tokens, np.memmap)
    assert [(t.tolist(), f.tolist()) for t, f in map(opened.sequence, range(3))] == pairs
    assert [opened.target_count(i) for i in range(3)] == [2, 0, 0]
    assert (opened.fingerprint, opened.report, opened.token_count) == ("print", {"rows": 3}, 6)
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]
