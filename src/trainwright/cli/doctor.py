"""``trainwright doctor``: find out why a run failed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainwright.errors import EXIT_TRAINING, RequestError
from trainwright.text import say

if TYPE_CHECKING:
    from trainwright.diagnosis.explain import Diagnosis, Finding


def doctor(
    explain: Annotated[
        str,
        typer.Option(metavar="LOG", help="Explain the errors in this log of a run, of any program; -: standard input."),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say why a run failed and what to do, from its log.

    Known are the usual errors of training on GPUs and several machines. If a log has several, the cause is told from
    what follows from it. An error that is not known is shown as it is.

    Ends with 0: explained, or no error found, 4: the error is not known, 2: the log cannot be read.
    """
    from trainwright.diagnosis.explain import explain as diagnose

    diagnosis = diagnose(_read(explain))
    if as_json:
        import json

        say(json.dumps(_values(diagnosis), indent=2), wrap=False)
    else:
        for line in _lines(diagnosis):
            say(line)
    if diagnosis.is_unknown_first:
        raise typer.Exit(EXIT_TRAINING)


def _read(log: str) -> str:
    """Return the text of a log, whatever bytes it has."""
    if log == "-":
        return sys.stdin.buffer.read().decode("utf-8", errors="replace")
    try:
        return Path(log).read_bytes().decode("utf-8", errors="replace")
    except OSError as error:
        raise RequestError(f"--explain: {log}: {error.strerror or error}; pass the log file of a run") from None


def _lines(diagnosis: Diagnosis) -> list[str]:
    lines: list[str] = []
    cause, unknown = diagnosis.cause, diagnosis.unknown
    if cause is not None:
        lines += _explanation(diagnosis, cause)
    elif unknown is not None and diagnosis.is_unknown_first:
        from trainwright.diagnosis.explain import shortened

        place = _place(unknown.number, [] if unknown.rank is None else [unknown.rank])
        lines += [f"not a known error ({place}):", f"  {shortened(unknown.text)}"]
    else:
        lines.append("no known error found")
    if diagnosis.followed:
        lines += ["followed by:" if cause or unknown else "found:", *map(_short, diagnosis.followed)]
    if diagnosis.signs:
        lines += ["also seen:", *map(_short, diagnosis.signs)]
    if cause is not None and unknown is not None:
        from trainwright.diagnosis.explain import shortened

        lines.append(f"also there, and not known: line {unknown.number}: {shortened(unknown.text)}")
    return lines


def _explanation(diagnosis: Diagnosis, cause: Finding) -> list[str]:
    said = "only a consequence is in this log" if diagnosis.is_only_follow_up else "cause"
    return [
        f"{said}: {cause.error.title} [{cause.error.name}] ({_place(cause.line.number, cause.ranks)})",
        f"  {cause.excerpt}",
        f"why:    {cause.error.cause}",
        *(f"here:   {detail}" for detail in diagnosis.details),
        *(f"do:     {fix}" for fix in cause.error.fixes),
    ]


def _short(finding: Finding) -> str:
    return f"  {finding.error.title} [{finding.error.name}] ({_place(finding.line.number, finding.ranks)})"


def _place(number: int, ranks: list[int]) -> str:
    from trainwright.diagnosis.details import ranks_in_words

    return f"{ranks_in_words(ranks)}, line {number}" if ranks else f"line {number}"


def _values(diagnosis: Diagnosis) -> dict[str, Any]:
    cause, unknown = diagnosis.cause, diagnosis.unknown
    return {
        "cause": None
        if cause is None
        else {**_finding(cause), "cause": cause.error.cause, "details": diagnosis.details, "fixes": cause.error.fixes},
        "is_only_follow_up": diagnosis.is_only_follow_up,
        "unknown": None
        if unknown is None
        else {
            "text": unknown.text,
            "line": unknown.number,
            "rank": unknown.rank,
            "is_cause": diagnosis.is_unknown_first,
        },
        "followed": [_finding(finding) for finding in diagnosis.followed],
        "signs": [_finding(finding) for finding in diagnosis.signs],
    }


def _finding(finding: Finding) -> dict[str, Any]:
    return {
        "name": finding.error.name,
        "title": finding.error.title,
        "role": finding.error.role.name.lower(),
        "line": finding.line.number,
        "ranks": finding.ranks,
        "excerpt": finding.excerpt,
        "count": finding.count,
    }
