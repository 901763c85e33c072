"""Unlearning benchmarks by name: which rows to forget and to keep, and the questions about them.

- ``tofu:forget10``: TOFU (arXiv 2401.06121) from the Hub; forget01, forget05 and forget10
- ``tofu:forget10@DIRECTORY``: the same from a directory with forget10_perturbed.jsonl, retain_perturbed.jsonl, …
- ``muse:news``, ``muse:books``: MUSE (arXiv 2407.06460) from the Hub; @DIRECTORY with raw/, verbmem/, knowmem/,
  privleak/
- ``wmdp:bio``, ``:chem``, ``:cyber``: WMDP (arXiv 2403.03218) from the Hub; @FILE with question, choices and answer
- ``files@forget=FILE,…``: your own rows: forget, retain and holdout, in any layout that training accepts

The part after the @ may also be another id of the Hub. A set is a source as in ``data.train``, so the training rows of
a benchmark are handled like any other rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from trainwright.errors import RequestError
from trainwright.utils.paths import expand_user_path

# How a row of a set asks: a question in the chat template, one after examples in plain text, the continuation of a
# text, or a letter; auto is detected from the rows.
Style = Literal["chat", "few_shot", "continue", "choices", "auto"]

TOFU_SPLITS = {"forget01": "retain99", "forget05": "retain95", "forget10": "retain90"}
_SUFFIXES = (".jsonl", ".json", ".parquet", ".csv")
_TOFU, _WMDP = "locuslab/TOFU", "cais/wmdp"
_MUSE = {"news": "muse-bench/MUSE-News", "books": "muse-bench/MUSE-Books"}
_WMDP_CORPORA = "cais/wmdp-corpora"
_WMDP_SUBJECTS = {"bio": "biology", "chem": "chemistry", "cyber": "cybersecurity"}
_NAMES = (
    "tofu:forget01, tofu:forget05, tofu:forget10, muse:news, muse:books, wmdp:bio, wmdp:chem, wmdp:cyber, each with "
    "@DIRECTORY for a local copy, or files@forget=FILE,retain=FILE,holdout=FILE"
)
KEY = "--benchmark"


@dataclass(frozen=True)
class EvaluationSet:
    """Rows of questions to a model.

    ``examples``: the source of the examples in a few-shot prompt. ``before``: the start of every prompt.
    """

    source: str
    style: Style
    examples: str | None = None
    before: str = ""


@dataclass(frozen=True)
class Benchmark:
    """Named sets of rows.

    Attributes:
        name: as given by the user.
        training: sources to train on: those of ``forget``, ``retain``, ``full`` (both), ``holdout`` (never trained on)
            and ``idk`` (one refusal per line) that the benchmark has.
        sets: sources to evaluate, of ``forget``, ``retain``, ``holdout``, ``real_authors``, ``world_facts``,
            ``verbatim`` (texts to continue), ``members`` (for membership inference, if not ``forget``) and ``choices``.
    """

    name: str
    training: Mapping[str, str]
    sets: Mapping[str, EvaluationSet]


def find_benchmark(name: str, key: str = KEY) -> Benchmark:
    """Return the benchmark named ``name``, without reading its rows. Imports no torch.

    Args:
        key: the recipe key, for messages.

    Raises:
        RequestError: the benchmark does not exist, or its directory lacks a file.
    """
    kind_and_part, _, origin = name.partition("@")
    kind, _, part = kind_and_part.partition(":")
    if kind == "files":
        return _build_from_files(name, origin, key)
    if kind == "tofu" and part in TOFU_SPLITS:
        return _build_tofu(name, part, _SplitDataset(origin or _TOFU, key))
    if kind == "muse" and part in _MUSE:
        return _build_muse(name, _SplitDataset(origin or _MUSE[part], key))
    if kind == "wmdp" and part in _WMDP_SUBJECTS:
        return _build_wmdp(name, part, origin, key)
    raise RequestError(f"{key}: unknown benchmark {name!r}; choose from {_NAMES}")


def is_missing_here(name: str) -> bool:
    """Return whether a benchmark is named by a directory that does not exist on this machine."""
    origin = name.partition("@")[2]
    return (
        bool(origin)
        and not name.startswith("files@")
        and not (expand_user_path(origin).exists() or _may_be_on_the_hub(origin))
    )


def _may_be_on_the_hub(origin: str) -> bool:
    return not origin.startswith((".", "/", "~")) and origin.count("/") == 1


class _SplitDataset:
    """A directory, or an id of the Hub, that holds sets by configuration and split."""

    def __init__(self, origin: str, key: str) -> None:
        self._origin, self._key = origin, key
        path = expand_user_path(origin)
        self._directory = path if path.is_dir() else None
        if self._directory is None and not _may_be_on_the_hub(origin):
            raise RequestError(
                f"{key}: no such directory {path}; after the @, give the directory of the benchmark's files, or "
                "remove the @ part to load them from the Hub"
            )

    def find(self, config: str, split: str = "") -> str | None:
        """Return the source of a set; None if the directory has no file for it. The Hub is not queried."""
        if self._directory is None:
            return f"{self._origin}:{config}:{split or 'train'}"
        stem = self._directory / config / split if split else self._directory / config
        for suffix in _SUFFIXES:
            if (file := stem.with_name(stem.name + suffix)).is_file():
                return str(file)
        shards = sorted(stem.parent.glob(f"{stem.name}-*-of-*.parquet"))
        return str(shards[0]) if len(shards) == 1 else None

    def need(self, config: str, split: str = "") -> str:
        """Return the source of a set like ``find``; raise RequestError if it does not exist."""
        source = self.find(config, split)
        if source is None:
            name = f"{config}/{split}" if split else config
            raise RequestError(
                f"{self._key}: {self._directory} has no file {name} with one of the suffixes {', '.join(_SUFFIXES)}"
            )
        return source

    @property
    def idk(self) -> str | None:
        """Return a file with one refusal per line; these are not rows, so the sets on the Hub have none."""
        files = (
            (self._directory / name for name in ("idk.jsonl", "idk.txt", "idontknow.jsonl")) if self._directory else ()
        )
        return next((str(file) for file in files if file.is_file()), None)


def _build_tofu(name: str, forget: str, dataset: _SplitDataset) -> Benchmark:
    holdout = forget.replace("forget", "holdout")
    training = {
        "forget": dataset.find(forget),
        "retain": dataset.find(TOFU_SPLITS[forget]),
        "full": dataset.find("full"),
        "holdout": dataset.find(holdout),
        "idk": dataset.idk,
    }
    sets = {"forget": EvaluationSet(dataset.need(f"{forget}_perturbed"), "chat")}
    for set_name, file in (
        ("retain", "retain_perturbed"),
        ("real_authors", "real_authors_perturbed"),
        ("world_facts", "world_facts_perturbed"),
        ("holdout", holdout),
    ):
        if (source := dataset.find(file)) is not None:
            sets[set_name] = EvaluationSet(source, "chat")
    return Benchmark(name, {set_name: source for set_name, source in training.items() if source is not None}, sets)


def _build_muse(name: str, dataset: _SplitDataset) -> Benchmark:
    def retain(config: str, suffix: str = "") -> str:
        # The authors' own files are named retain2, their sets on the Hub retain.
        return dataset.find(config, f"retain{suffix}") or dataset.need(config, f"retain2{suffix}")

    training = {"forget": dataset.need("raw", "forget"), "retain": dataset.need("raw", "retain1")}
    training["holdout"] = dataset.need("raw", "holdout")
    sets = {
        "forget": EvaluationSet(
            dataset.need("knowmem", "forget_qa"), "few_shot", dataset.need("knowmem", "forget_qa_icl")
        ),
        "retain": EvaluationSet(retain("knowmem", "_qa"), "few_shot", retain("knowmem", "_qa_icl")),
        "verbatim": EvaluationSet(dataset.need("verbmem", "forget"), "continue"),
        "members": EvaluationSet(dataset.need("privleak", "forget"), "continue"),
        "holdout": EvaluationSet(dataset.need("privleak", "holdout"), "continue"),
    }
    return Benchmark(name, training, sets)


def _build_wmdp(name: str, part: str, origin: str, key: str) -> Benchmark:
    local = bool(origin) and expand_user_path(origin).is_file()
    if origin and not local and not _may_be_on_the_hub(origin):
        raise RequestError(
            f"{key}: no such file {origin}; after wmdp's @, give a file of rows with question, choices and answer, or "
            "remove the @ part to load it from the Hub"
        )
    source = origin if local else f"{origin or _WMDP}:wmdp-{part}:test"
    training = {}
    if part == "cyber":  # the forget corpus on biology is available on request only, and there is none on chemistry
        training["forget"] = f"{_WMDP_CORPORA}:cyber-forget-corpus:train"
    if part != "chem":
        training["retain"] = f"{_WMDP_CORPORA}:{part}-retain-corpus:train"
    # The format of lm-evaluation-harness, with which the authors measure.
    before = f"The following are multiple choice questions (with answers) about {_WMDP_SUBJECTS[part]}.\n\n"
    return Benchmark(name, training, {"choices": EvaluationSet(source, "choices", before=before)})


def _build_from_files(name: str, origins: str, key: str) -> Benchmark:
    names = ("forget", "retain", "holdout")
    sources: dict[str, str] = {}
    for part in origins.split(","):
        set_name, equals, source = part.partition("=")
        if set_name not in names or not equals or not source:
            raise RequestError(
                f"{key}: {part!r} in {name!r} is invalid; use {', '.join(f'{known_name}=FILE' for known_name in names)}"
            )
        sources[set_name] = source
    if "forget" not in sources:
        raise RequestError(f"{key}: {name!r} names no rows to forget; add forget=FILE")
    return Benchmark(name, sources, {set_name: EvaluationSet(source, "auto") for set_name, source in sources.items()})
