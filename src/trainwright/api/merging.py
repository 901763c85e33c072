"""Merging an adapter into its base model."""

from __future__ import annotations

import sys
from os import PathLike, fspath
from typing import TYPE_CHECKING

from trainwright.activity import Activity
from trainwright.api.processes.separate import run_in_process
from trainwright.errors import RequestError
from trainwright.models.merged import Merged
from trainwright.models.resolve_model import check_exists
from trainwright.paths import user_path
from trainwright.text import quoted

if TYPE_CHECKING:
    import torch

    from trainwright.inference.finding import FoundModel


def merge(
    model: str | PathLike[str],
    out: str | PathLike[str],
    *,
    adapter: str | PathLike[str] | None = None,
    dtype: str | None = None,
    progress: bool = False,
    trust_code: bool = False,
) -> Merged:
    """Merge an adapter into its base model, and check the result by its logits; what ``trainwright merge`` does.

    Args:
        model: a `Run` or its directory, an adapter's directory, or the base of ``adapter``.
        out: the directory of the merged model; must be new.
        adapter: the adapter, if ``model`` is its base.
        dtype: store it in ``fp32``, ``bf16`` or ``fp16``. Default: the data type of the base.
        progress: show operations that take long.
        trust_code: import the code that the recipe of a run names as ``module:Name``; otherwise none of it runs.

    Raises:
        RequestError: there is no adapter, or ``out`` already exists.
        TrainingError: the result does not compute the same as base and adapter; nothing is written.

    Examples:
        >>> import trainwright as tw
        >>> tw.merge("runs/tiny", "merged")
        Traceback (most recent call last):
            ...
        trainwright.errors.RequestError: no adapter to merge: ...
    """
    words = fspath(model), fspath(out), None if adapter is None else fspath(adapter), dtype
    return run_in_process(merged, *words, progress=progress, trust_code=trust_code)


def merged(model: str, out: str, adapter: str | None, dtype: str | None) -> Merged:
    """Merge in this process."""
    check_exists(model, "MODEL")  # before torch is imported
    from trainwright.inference.finding import find_model
    from trainwright.inference.loading import for_users
    from trainwright.models.merging import merge as work_in

    with for_users(), Activity(sys.stderr, "reading the model"):
        found = find_model(model, adapter)
        check_finished(found)
        _refuse_full(found)
        return work_in(found.section, found.seed, user_path(out), dtype_of(dtype))


def check_finished(found: FoundModel) -> None:
    """Raise RequestError for an adapter that exists only in a checkpoint."""
    if found.checkpoint is not None and found.section.adapter.type != "none":
        raise RequestError(
            f"{found.origin} is a checkpoint of an adapter, which cannot be merged before its run is finished: "
            f"continue with trainwright train --resume {quoted(found.run or 'RUN')}, then pass the run or its final/"
        )


def _refuse_full(found: FoundModel) -> None:
    """Raise RequestError for a run that trained the full model."""
    if found.run is not None and found.section.adapter.type == "none":
        use = (
            "which can be used as it is" if found.checkpoint is None else "which `trainwright export` writes as a model"
        )
        raise RequestError(
            f"no adapter to merge: {found.run} was trained without one; its full model is in {found.origin}, {use}"
        )


def dtype_of(name: str | None) -> torch.dtype | None:
    """Return the data type of ``--dtype``. Raises RequestError."""
    import torch

    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    if name is not None and name not in dtypes:
        raise RequestError(f"--dtype: unknown type {name!r}; choose from {', '.join(dtypes)}")
    return None if name is None else dtypes[name]
