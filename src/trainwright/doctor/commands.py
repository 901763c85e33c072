"""``trainwright doctor``, ``verify`` and ``drill``: check a machine, a failed run, a recipe, recovery from faults."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainwright.cli.recipe import Overrides, RecipeFile
from trainwright.cli.trust import TrustCode
from trainwright.errors import EXIT_MACHINE, EXIT_TRAINING, RequestError
from trainwright.utils.text import plural, say, table_width

if TYPE_CHECKING:
    from trainwright.doctor.diagnosis.explain import Diagnosis, LogError
    from trainwright.doctor.diagnosis.log import LogText


def doctor(
    checks: Annotated[
        list[str] | None, typer.Argument(metavar="[CHECK]...", help="Only these checks. Default: all.")
    ] = None,
    explain: Annotated[
        str | None,
        typer.Option(
            metavar="LOG",
            help="Explain the errors in this log of a run, of any program, or in all logs of this run directory; "
            "-: standard input.",
        ),
    ] = None,
    ports: Annotated[
        list[int] | None,
        typer.Option(
            "--port",
            min=1,
            max=65535,
            help="A port that has to be free; can be given several times. Default: MASTER_PORT, or torchrun's 29500.",
        ),
    ] = None,
    directories: Annotated[
        list[str] | None,
        typer.Option(
            "--directory",
            metavar="DIRECTORY",
            help="Measure the disk of this directory; can be given several times. Default: the working directory, the "
            "cache and the temporary directory.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check this machine; or say why a run failed and what to do, from its log.

    The checks: versions that fit each other, drivers, compilers, kernels, limits, disks, ports, interfaces, variables
    of NCCL, the health of GPUs, and two processes that train with every strategy or fail on purpose. They change
    nothing, and no further check begins when time is up: at most two minutes on a CPU, ten with GPUs. Each finding has
    its fix.

    With --explain: known are the usual errors of training on GPUs and several machines. If a log has several, the cause
    is told from what follows from it. An error that is not known is shown as it is.

    Ends with 0: nothing is broken, or explained, 3: something on this machine is broken, 4: the error is not known, 2:
    no such check, or the log cannot be read, 75: stopped.
    """
    if explain is None:
        _check_machine(tuple(checks or ()), tuple(ports or ()), tuple(directories or ()), as_json)
    elif checks or ports or directories:
        raise RequestError("--explain reads a log and checks nothing; pass no checks, --port or --directory with it")
    else:
        _explain(explain, as_json)


def _check_machine(
    checks: tuple[str, ...], ports: tuple[int, ...], directories: tuple[str, ...], as_json: bool
) -> None:
    from trainwright.doctor.operations import MachineRequest, examine_machine

    report = examine_machine(MachineRequest(checks, ports, directories))
    if as_json:
        import json

        say(json.dumps(report.values(), indent=2), wrap=False)
    else:
        for line in report.lines():
            say(line)
    if report.is_broken:
        raise typer.Exit(EXIT_MACHINE)


def _explain(source: str, as_json: bool) -> None:
    from trainwright.doctor.diagnosis.explain import explain as diagnose

    log = _read(source)
    diagnosis = diagnose(log.text)
    if as_json:
        import json

        say(json.dumps(_values(diagnosis, log), indent=2), wrap=False)
    else:
        for line in _lines(diagnosis, log):
            say(line)
    if diagnosis.is_unknown_first:
        raise typer.Exit(EXIT_TRAINING)


def _read(source: str) -> LogText:
    """Return the text of a log, whatever bytes it has."""
    from trainwright.doctor.diagnosis.log import LogText
    from trainwright.doctor.operations import read_log

    if source == "-":
        return LogText(sys.stdin.buffer.read().decode("utf-8", errors="replace"))
    return read_log(source)


def _lines(diagnosis: Diagnosis, log: LogText) -> list[str]:
    lines: list[str] = []
    cause, unknown = diagnosis.cause, diagnosis.unknown
    if cause is not None:
        lines += _explanation(diagnosis, cause, log)
    elif unknown is not None and diagnosis.is_unknown_first:
        from trainwright.doctor.diagnosis.explain import shortened

        location = _location(log, unknown.number, [] if unknown.rank is None else [unknown.rank])
        lines += [f"not a known error ({location}):", f"  {shortened(unknown.text)}"]
    else:
        lines.append("no known error found")
    if diagnosis.followed:
        lines += ["followed by:" if cause or unknown else "found:", *(_short(one, log) for one in diagnosis.followed)]
    if diagnosis.signs:
        lines += ["also seen:", *(_short(one, log) for one in diagnosis.signs)]
    if cause is not None and unknown is not None:
        from trainwright.doctor.diagnosis.explain import shortened

        lines.append(f"also in the log, but unknown: {_location(log, unknown.number, [])}: {shortened(unknown.text)}")
    if diagnosis.skipped:
        lines.append(f"the log is long: {plural(diagnosis.skipped, 'line')} that may report errors were not compared")
    return lines


def _explanation(diagnosis: Diagnosis, cause: LogError, log: LogText) -> list[str]:
    heading = "only a consequence is in this log" if diagnosis.is_only_follow_up else "cause"
    return [
        f"{heading}: {cause.error.title} [{cause.error.name}] ({_location(log, cause.line.number, cause.ranks)})",
        f"  {cause.excerpt}",
        f"why:    {cause.error.cause}",
        *(f"here:   {detail}" for detail in diagnosis.details),
        *(f"do:     {fix}" for fix in diagnosis.fixes),
    ]


def _short(finding: LogError, log: LogText) -> str:
    return f"  {finding.error.title} [{finding.error.name}] ({_location(log, finding.line.number, finding.ranks)})"


def _location(log: LogText, number: int, ranks: list[int]) -> str:
    from trainwright.doctor.diagnosis.explain import ranks_in_words

    file, line = log.place(number)
    where = f"line {line}" if file is None else f"line {line} of {file}"
    return f"{ranks_in_words(ranks)}, {where}" if ranks else where


def _values(diagnosis: Diagnosis, log: LogText) -> dict[str, Any]:
    cause, unknown = diagnosis.cause, diagnosis.unknown
    return {
        "cause": None
        if cause is None
        else {
            **_finding(cause, log),
            "cause": cause.error.cause,
            "details": diagnosis.details,
            "fixes": diagnosis.fixes,
        },
        "is_only_follow_up": diagnosis.is_only_follow_up,
        "unknown": None
        if unknown is None
        else {
            "text": unknown.text,
            **_line(log, unknown.number),
            "rank": unknown.rank,
            "is_cause": diagnosis.is_unknown_first,
        },
        "followed": [_finding(finding, log) for finding in diagnosis.followed],
        "signs": [_finding(finding, log) for finding in diagnosis.signs],
        "skipped": diagnosis.skipped,
    }


def _finding(finding: LogError, log: LogText) -> dict[str, Any]:
    return {
        "name": finding.error.name,
        "title": finding.error.title,
        "role": finding.error.role.name.lower(),
        **_line(log, finding.line.number),
        "ranks": finding.ranks,
        "excerpt": finding.excerpt,
        "count": finding.count,
    }


def _line(log: LogText, number: int) -> dict[str, Any]:
    """Return the place of a line; with its file if the log has several."""
    file, line = log.place(number)
    return {"line": line} if file is None else {"line": line, "file": str(file)}


def verify(
    recipe: RecipeFile,
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(min=1, help="Number of optimizer steps to compare.")] = 5,
    accelerate_config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Take the number of processes, strategy and related settings from this Accelerate file.",
        ),
    ] = None,
    trust_code: TrustCode = False,
) -> None:
    """Compare a few steps on one process with the recipe's strategy and processes, on this machine.

    Losses and gradient norms are shown side by side; nothing is written under runs/. Ends with 0: the same run, 4: they
    differ or one failed, 2: wrong request, 3: this machine cannot do it, 75: stopped.
    """
    from trainwright.doctor.operations import VerifyRequest, compare

    if not compare(VerifyRequest(recipe, tuple(overrides or ()), steps, accelerate_config)).is_same:
        raise typer.Exit(EXIT_TRAINING)


def drill(
    recipe: RecipeFile,
    overrides: Overrides = None,
    output: Annotated[
        Path | None, typer.Option(metavar="DIRECTORY", help="Must not exist. Default: drills/<recipe>.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the drill in the output directory.")] = False,
    seed: Annotated[int, typer.Option(help="Draws the kinds, moments, ranks and places of the faults.")] = 0,
    tries: Annotated[
        int | None, typer.Option(help="How many faults. Default: one of each kind, or as many as --minutes allows.")
    ] = None,
    minutes: Annotated[float | None, typer.Option(help="Begin no fault after this time.")] = None,
    kinds: Annotated[
        list[str] | None, typer.Option(metavar="PATTERN", help="Only kinds of faults with such names; repeatable.")
    ] = None,
    strategies: Annotated[
        str, typer.Option(metavar="NAME,NAME…", help="Default: the recipe's, or all that need no other library.")
    ] = "",
    processes: Annotated[str, typer.Option(metavar="N,N…", help="Numbers of processes. Default: 1,2.")] = "",
    jobs: Annotated[int, typer.Option(help="How many faults at once.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Inject faults into short runs of a recipe, and compare each run with the undisturbed one.

    Processes are killed and signalled at every phase, disks fill up, checkpoints are damaged, numbers go wrong. Ends
    with 0: everything that could be tried held, 4: a trial is broken or missed, or none could be tried, 2: wrong
    request, 3: this machine cannot do it, 75: stopped.
    """
    import trainwright as tw

    outcome = tw.drill(
        recipe,
        *(overrides or []),
        output=output,
        seed=seed,
        tries=tries,
        minutes=minutes,
        kinds=kinds or (),
        strategies=_words(strategies),
        processes=_numbers(processes),
        jobs=jobs,
        resume=resume,
        progress=True,
    )
    if as_json:
        import json

        say(json.dumps(outcome.values(), indent=2), wrap=False)
    else:
        say(f"{outcome.table(table_width(sys.stdout))}\n\n{outcome.directory}/", wrap=False)
    if not outcome.held:
        raise typer.Exit(EXIT_TRAINING)


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _numbers(text: str) -> list[int]:
    try:
        return [int(word) for word in _words(text)]
    except ValueError:
        raise RequestError(f"--processes {text}: expected numbers separated by commas") from None
