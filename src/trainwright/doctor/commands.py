"""``trainwright doctor``, ``verify`` and ``drill``: check a machine, a failed run, a recipe, recovery from faults."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainwright.cli.command import TrustCode
from trainwright.cli.recipe import Overrides, RecipeFile
from trainwright.cli.train import AccelerateFile
from trainwright.errors import EXIT_MACHINE, EXIT_TRAINING, MachineError, RequestError
from trainwright.utils.text import format_plural, format_ranks, say

if TYPE_CHECKING:
    from trainwright.doctor.diagnosis import Diagnosis, LogError, LogText


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
    nothing, and no further check begins when time is up: at most two minutes on a CPU, ten with GPUs; a check that is
    run alone takes as long as it needs. Each finding has its fix.

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
    from trainwright.doctor.diagnosis import explain as diagnose

    log = _read(source)
    diagnosis = diagnose(log.text)
    if as_json:
        import json

        say(json.dumps(_convert_diagnosis(diagnosis, log), indent=2), wrap=False)
    else:
        for line in _format_diagnosis(diagnosis, log):
            say(line)
    if diagnosis.is_unknown_first:
        raise typer.Exit(EXIT_TRAINING)


def _read(source: str) -> LogText:
    """Return the text of a log, whatever bytes it has."""
    from trainwright.doctor.diagnosis import LogText
    from trainwright.doctor.operations import read_log

    if source == "-":
        return LogText(sys.stdin.buffer.read().decode("utf-8", errors="replace"))
    return read_log(source)


def _format_diagnosis(diagnosis: Diagnosis, log: LogText) -> list[str]:
    from trainwright.doctor.diagnosis import shorten_line

    lines: list[str] = []
    cause, unknown = diagnosis.cause, diagnosis.unknown
    if cause is not None:
        lines += _format_explanation(diagnosis, cause, log)
    elif unknown is not None and diagnosis.is_unknown_first:
        location = _format_place(log, unknown.number, [] if unknown.rank is None else [unknown.rank])
        lines += [f"not a known error ({location}):", f"  {shorten_line(unknown.text)}"]
    else:
        lines.append("no known error found")
    if diagnosis.followed:
        lines += [
            "followed by:" if cause or unknown else "found:",
            *(_format_finding(error, log) for error in diagnosis.followed),
        ]
    if diagnosis.signs:
        lines += ["also seen:", *(_format_finding(error, log) for error in diagnosis.signs)]
    if cause is not None and unknown is not None:
        lines.append(
            f"also in the log, but unknown: {_format_place(log, unknown.number, [])}: {shorten_line(unknown.text)}"
        )
    if diagnosis.skipped:
        lines.append(
            f"the log is long: {format_plural(diagnosis.skipped, 'line')} that may report errors were not compared"
        )
    return lines


def _format_explanation(diagnosis: Diagnosis, cause: LogError, log: LogText) -> list[str]:
    heading = "only a consequence is in this log" if diagnosis.is_only_follow_up else "cause"
    return [
        f"{heading}: {cause.error.title} [{cause.error.name}] ({_format_place(log, cause.line.number, cause.ranks)})",
        f"  {cause.excerpt}",
        f"why:    {cause.error.cause}",
        *(f"here:   {detail}" for detail in diagnosis.details),
        *(f"do:     {fix}" for fix in diagnosis.fixes),
    ]


def _format_finding(finding: LogError, log: LogText) -> str:
    return f"  {finding.error.title} [{finding.error.name}] ({_format_place(log, finding.line.number, finding.ranks)})"


def _format_place(log: LogText, number: int, ranks: list[int]) -> str:
    file, line = log.place(number)
    location = f"line {line}" if file is None else f"line {line} of {file}"
    return f"{format_ranks(ranks)}, {location}" if ranks else location


def _convert_diagnosis(diagnosis: Diagnosis, log: LogText) -> dict[str, Any]:
    cause, unknown = diagnosis.cause, diagnosis.unknown
    return {
        "cause": None
        if cause is None
        else {
            **_convert_finding(cause, log),
            "cause": cause.error.cause,
            "details": diagnosis.details,
            "fixes": diagnosis.fixes,
        },
        "is_only_follow_up": diagnosis.is_only_follow_up,
        "unknown": None
        if unknown is None
        else {
            "text": unknown.text,
            **_convert_line(log, unknown.number),
            "rank": unknown.rank,
            "is_cause": diagnosis.is_unknown_first,
        },
        "followed": [_convert_finding(finding, log) for finding in diagnosis.followed],
        "signs": [_convert_finding(finding, log) for finding in diagnosis.signs],
        "skipped": diagnosis.skipped,
    }


def _convert_finding(finding: LogError, log: LogText) -> dict[str, Any]:
    return {
        "name": finding.error.name,
        "title": finding.error.title,
        "role": finding.error.role.name.lower(),
        **_convert_line(log, finding.line.number),
        "ranks": finding.ranks,
        "excerpt": finding.excerpt,
        "count": finding.count,
    }


def _convert_line(log: LogText, number: int) -> dict[str, Any]:
    """Return the place of a line; with its file if the log has several."""
    file, line = log.place(number)
    return {"line": line} if file is None else {"line": line, "file": str(file)}


def verify(
    recipe: RecipeFile,
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(min=1, help="Number of optimizer steps to compare.")] = 5,
    accelerate_config: AccelerateFile = None,
    trust_code: TrustCode = False,
) -> None:
    """Compare a few steps on one process with the recipe's strategy and processes, on this machine.

    Losses and gradient norms are shown side by side; nothing is written under runs/. Ends with 0: the same run, 4: they
    differ or one failed, 2: wrong request, 3: this machine cannot do it, 75: stopped.
    """
    from trainwright.doctor.operations import VerifyRequest, compare

    if not compare(VerifyRequest(recipe, tuple(overrides or ()), steps, accelerate_config)).is_same:
        raise typer.Exit(EXIT_TRAINING)


def calibrate(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Measure this machine in under a minute, for plans to use; cached until torch or the driver changes.

    Matrix products, memory, attention, the optimizer and collectives, in one process and in as many as training may
    use. Measurements that other programs disturb are left out; if there are too many, nothing is saved, and an earlier
    calibration stays.

    Ends with 0: measured and saved, 3: not reliable, and not saved.
    """
    import json

    from trainwright.doctor.calibrate import calibrate as measure
    from trainwright.doctor.calibrate import format_calibration
    from trainwright.machine.detect import detect
    from trainwright.machine.measured.calibration import locate_calibration, save_if_reliable
    from trainwright.machine.measured.calibration import to_json as values

    machine = detect()
    calibration = measure(machine, say=lambda text: say(text, file=sys.stderr))
    refusal = save_if_reliable(calibration, machine)
    if as_json:
        say(json.dumps(values(calibration), indent=1), wrap=False)
    else:
        for line in format_calibration(calibration):
            say(line)
    if refusal is not None:
        raise MachineError(refusal)
    say(f"kept in {locate_calibration(machine)}", file=sys.stderr if as_json else sys.stdout)
