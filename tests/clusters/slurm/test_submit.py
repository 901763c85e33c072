"""Jobs for Slurm without a Slurm: the file, its defaults, what is refused, and when a job goes back into the queue."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import trainwright as tw
from tests.support import commands as run_commands
from tests.support.commands import ROOT, environment, wait_for
from tests.support.fake_slurm import clusters, commands
from tests.support.runs import ON_ROWS, ROWS, TINY
from trainwright.clusters.job_attempts import count_failures, may_continue
from trainwright.clusters.slurm import job_step, scheduler
from trainwright.errors import MachineError, RequestError
from trainwright.recipe.loading import load_recipe
from trainwright.recipe.sections.parallel import parse_job_seconds

pytestmark = pytest.mark.usefixtures("here")


def trainwright(*words: str) -> str:
    done = run_commands.trainwright(*words, cwd=Path.cwd())
    assert done.returncode == 0, done.stderr
    return done.stdout


def printed(*overrides: str, recipe: Path = TINY, to: str | None = "slurm", **options: object) -> list[str]:
    made = tw.submit(recipe, ON_ROWS, *overrides, to=to, dry_run=True, **options)  # type: ignore[arg-type]
    assert made.job is None and not (Path("runs")).exists()
    return made.script.splitlines()


def test_the_file_asks_for_what_was_asked_and_has_no_secret(here: Path) -> None:
    lines = printed(nodes=2, gpus_per_node=8, time="4h", partition="gpu", account="me", array="0-9%2", until_done=True)
    asked = {line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH ")}
    assert asked >= {
        *("--job-name=tiny", "--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=8", "--time=4:00:00"),
        *("--partition=gpu", "--account=me", "--array=0-9%2", "--open-mode=append", "--requeue", "--signal=USR1@120"),
        *(f'--comment="trainwright:{here}/runs/tiny"', f'--output="{here}/runs/tiny/slurm/%A_%a.log"'),
    }
    (srun,) = (line for line in lines if line.startswith("srun "))
    assert srun.endswith(f"logging.run_directory={here}/runs/tiny --resume auto --nodes 2")
    assert lines[-1].endswith('"$run" "$code" --until-done') and "hf_secret" not in "\n".join(lines)


def test_options_come_before_the_recipe_and_the_recipe_before_the_cluster(here: Path) -> None:
    clusters(
        here,
        "big: {partition: low, account: ours, time: 1 h, nodes: 4, options: [--exclusive], setup: [module load cuda]}",
    )
    (here / "r.yaml").write_text(f"include: {TINY}\nlaunch: {{to: big, time: 2 h, partition: high}}\n")
    lines = printed(recipe=here / "r.yaml", to=None, partition="gpu")
    asked = [line.removeprefix("#SBATCH --") for line in lines]
    assert {"partition=gpu", "time=2:00:00", "account=ours", "nodes=4", "exclusive"} <= set(asked)
    assert "module load cuda" in lines


def test_nothing_that_a_name_says_is_executed(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is run with an srun that writes its words down."""
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"].rstrip(os.pathsep))
    odd = here / "a b'$(touch pwned)`touch pwned`"
    odd.mkdir()
    recipe = odd / "r $(touch pwned).yaml"
    recipe.write_text(f"include: {TINY}\n")
    (here / "bin").mkdir()
    (here / "bin" / "srun").write_text('#!/bin/bash\nprintf "%s\\n" "$@" >srun.txt\nexit 2\n')
    (here / "bin" / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{here / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("TRAINWRIGHT_CACHE", "$(touch pwned)\n`touch pwned`'")
    (here / "argparse.py").write_text("open('pwned', 'w')\n")  # Python looks here first, unless it is told not to
    prompt = "evaluate.prompts=['$(touch pwned) {element}; touch pwned']"
    lines = printed(prompt, f"logging.run_directory={odd}/run", recipe=recipe, array="3-4")
    (here / "job.sbatch").write_text("\n".join(lines) + "\n")
    variables = {**os.environ, "SLURM_JOB_ID": "1", "SLURM_ARRAY_TASK_ID": "3"}
    subprocess.run(["bash", "job.sbatch"], env=variables, timeout=100)
    words = (here / "srun.txt").read_text().splitlines()
    train = words.index("train")
    assert words[train - 3 : train] == ["-P", "-m", "trainwright"] and words[train + 1] == str(recipe)
    assert prompt.replace("{element}", "3") in words and f"logging.run_directory={odd}/run" in words
    assert not [*here.rglob("pwned")]


@pytest.mark.parametrize("name", ["a #b: c", "a: b", "a b", "end:"])
def test_a_run_trains_in_the_directory_of_its_job(name: str, here: Path) -> None:
    """An override is YAML, in which these names are more than a text."""
    directory = here / name / "run"
    lines = printed(f'logging.run_directory="{directory}"')
    assert f"run={shlex.quote(str(directory))}" in lines
    (srun,) = (line for line in lines if line.startswith("srun "))
    words = shlex.split(srun)
    overrides = words[words.index("train") + 2 : words.index("--resume")]
    assert load_recipe(TINY, overrides).logging.run_directory == str(directory)


@pytest.mark.parametrize("name", ["a b", "a'b", 'a"b', "a\nb", "$(touch pwned)", "a;b", "-a", "../a", "", "a/b"])
def test_a_name_that_is_not_plain_is_refused(name: str, here: Path) -> None:
    with pytest.raises(RequestError, match=r"--name: .* is not a plain name"):
        printed(name=name)
    assert not [*here.rglob("pwned")]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"time": "soon"}, "--time: expected a time such as 4 h"),
        ({"partition": "a b"}, "--partition: expected a name of letters"),
        ({"array": "0-9; rm"}, "--array: expected indices such as 0-9"),
        ({"to": "nowhere"}, "--to nowhere: no such cluster in .*clusters.yaml; there are: slurm"),
        (
            {"jobs": 2, "until_done": True},
            "--jobs: several jobs of one run are not for --until-done, .*leave one of the",
        ),
        ({"jobs": 2, "array": "0-3"}, "--jobs: several jobs of one run are not for --array"),
        ({"jobs": 2, "to": "ray"}, "--jobs: is for slurm, and a job of ray starts its run again by itself; remove it"),
        ({"to": None}, "--to: where to submit to is missing"),
    ],
)
def test_wrong_options_are_refused_by_name(options: dict[str, object], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        printed(**options)


def test_wrong_keys_of_a_cluster_are_refused_with_their_file(here: Path) -> None:
    clusters(here, "big: {partitoin: low}")
    with pytest.raises(RequestError, match=r"clusters.yaml: big.partitoin: expected one of nodes, "):
        printed(to="big")


def test_element_needs_an_array_and_paths_no_quotes(here: Path) -> None:
    with pytest.raises(RequestError, match="pass --array"):
        printed("train.seed={element}")
    with pytest.raises(RequestError, match="has a quote, a backslash or a control character"):
        printed("logging.run_directory='a\"b'")


@pytest.mark.parametrize("written", ["logging.run_directory=x-{element}", "logging={run_directory: 'x-{element}'}"])
def test_a_directory_of_an_array_has_no_element(written: str, here: Path) -> None:
    with pytest.raises(RequestError, match=r"logging.run_directory: \{element\} is not replaced"):
        printed(written, array="0-3")
    (here / "r.yaml").write_text(f"include: {TINY}\nlogging: {{run_directory: 'x-{{element}}'}}\n")
    with pytest.raises(RequestError, match=r"logging.run_directory: \{element\} is not replaced"):
        printed(recipe=here / "r.yaml", array="0-3")


def test_a_run_has_a_name_or_a_directory(here: Path) -> None:
    (here / "r.yaml").write_text(f"include: {TINY}\nlogging: {{run_directory: {here}/own}}\n")
    assert "#SBATCH --job-name=own" in printed(recipe=here / "r.yaml")
    with pytest.raises(
        RequestError, match=r"--name: is the name of a run in runs, but logging.run_directory is .*/own"
    ):
        printed(recipe=here / "r.yaml", name="x")
    with pytest.raises(RequestError, match=r"--name: is the name of a run in runs, but logging.run_directory is /y"):
        printed("logging.run_directory=/y", name="x")
    assert f"run={here}/runs/x" in printed("logging.run_directory=auto", recipe=here / "r.yaml", name="x")


def test_without_a_scheduler_nothing_is_written(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(here))
    with pytest.raises(RequestError, match="no scheduler found: there is no squeue here"):
        tw.submit(TINY, ON_ROWS, to="slurm")
    assert not (here / "runs").exists()


@pytest.mark.slow
def test_what_cannot_fit_is_refused_before_it_is_queued(here: Path) -> None:
    clusters(here, "small: {machine: 1xT4}\nbig: {machine: 8xH100, gpus_per_node: 2}")
    large = here / "large.yaml"
    large.write_text(
        f"task: sft\nmodel: {{name: meta-llama/Llama-3.1-8B}}\ndata: {{train: {ROWS}, validation: null}}\n"
    )
    with pytest.raises(MachineError, match="T4"):
        tw.submit(large, to="small", dry_run=True)
    assert tw.submit(large, to="small", dry_run=True, force=True).plan is not None
    made = tw.submit(TINY, ON_ROWS, to="big", time="1h", nodes=2, dry_run=True)
    assert made.plan is not None and made.plan.details.cluster.devices_per_node == 2
    assert made.plan.details.cluster.nodes == 2
    assert any(line.startswith("about ") and line.endswith("of a job") for line in made.lines())


def test_a_job_asks_for_the_gpus_that_it_is_planned_for(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, words in {"gpus.json": ("--on", "4xT4"), "cpus.json": ()}.items():
        (here / name).write_text(trainwright("machine", "--json", *words))
    machines = {"eight": "8xH100", "one": "H100", "half": "8xH100, gpus_per_node: 4", "file": "gpus.json"}
    clusters(here, "".join(f"{name}: {{machine: {on}}}\n" for name, on in {**machines, "cpu": "cpus.json"}.items()))
    commands(here, monkeypatch, sinfo='echo "gpu*|64|gpu:8"', scontrol="")
    for name, gpus in {"eight": 8, "one": 1, "half": 4, "file": 4, "cpu": None}.items():
        made = tw.submit(TINY, ON_ROWS, to=name, dry_run=True)
        asked = [line for line in made.script.splitlines() if line.startswith(("#SBATCH --cpus", "#SBATCH --gpus"))]
        share = f"#SBATCH --cpus-per-task={64 if gpus is None else 64 * gpus // 8}"
        assert asked == [share, *([f"#SBATCH --gpus-per-node={gpus}"] if gpus else [])]
        assert made.plan is not None and made.plan.details.cluster.devices_per_node == (gpus or 1)
    two = tw.submit(TINY, ON_ROWS, to="one", nodes=2, dry_run=True).plan
    assert two is not None and (two.details.cluster.nodes, two.details.cluster.devices) == (2, 2)
    for options, size in (({"nodes": 2}, (2, 4)), ({"gpus_per_node": 2}, (1, 2))):
        plan = tw.submit(TINY, ON_ROWS, to="file", dry_run=True, **options).plan  # type: ignore[arg-type]
        assert plan is not None
        cluster = plan.details.cluster
        assert (cluster.nodes, cluster.devices_per_node) == size and (cluster.network is not None) is (size[0] > 1)
        assumed = "a network of" if size[0] > 1 else "of a whole node, for 2 of its 4 GPUs"
        assert any(assumed in each for each in cluster.assumptions)
    processors = tw.submit(TINY, ON_ROWS, to="cpu", nodes=2, dry_run=True).plan
    assert processors is not None and processors.details.cluster.devices == 2


def test_the_machine_of_a_cluster_is_one_node(here: Path) -> None:
    clusters(here, "big: {machine: 4x8xH100}\nodd: {machine: 8xH1000}\n")
    with pytest.raises(RequestError, match="machine: 4x8xH100 has 4 nodes; describe one of them"):
        printed(to="big")
    with pytest.raises(RequestError, match=r"machine: .*H1000"):
        printed(to="odd")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 5400), ("90:30", 5430), ("4:00:00", 14400), ("1-12", 129600), ("1-0:30:00", 88200), ("4 h", 14400)],
)
def test_times_are_read_as_slurm_reads_them(text: str, seconds: int) -> None:
    assert parse_job_seconds(text) == seconds


@pytest.mark.parametrize(
    ("code", "continues"), [(0, False), (2, False), (3, False), (4, False), (5, True), (75, True), (137, True)]
)
def test_what_the_run_failed_by_is_not_retried(code: int, continues: bool) -> None:
    assert may_continue(code) is continues


def test_variables_of_sbatch_do_not_override_what_was_asked(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """sbatch takes its variables before the options of the file; those of other options are a site's or the user's."""
    ours = "ACCOUNT ARRAY_INX CPUS_PER_GPU ERROR GPUS GPUS_PER_NODE JOB_NAME MEM_PER_CPU NO_REQUEUE OPEN_MODE OUTPUT"
    ours += " PARTITION SIGNAL TIMELIMIT WAIT"
    for name in [*ours.split(), *("EXPORT", "MEM_BIND", "QOS", "REQUEUE", "RESERVATION")]:
        monkeypatch.setenv(f"SBATCH_{name}", "x")
    monkeypatch.setenv("SQUEUE_STATES", "RUNNING")
    commands(
        here, monkeypatch, sbatch="env >seen; echo 7", squeue='[ -z "$SQUEUE_STATES" ]', sinfo='echo "gpu*|64|gpu:8"'
    )
    clusters(here, "big: {options: [--mem=0]}\n")
    options = {"account": "me", "partition": "gpu", "time": "4h", "gpus_per_node": 8}
    assert tw.submit(TINY, ON_ROWS, to="big", **options).job == "7"  # type: ignore[arg-type]
    passed = {line.partition("=")[0] for line in (here / "seen").read_text().splitlines()}
    kept = {"SBATCH_EXPORT", "SBATCH_MEM_BIND", "SBATCH_QOS", "SBATCH_REQUEUE", "SBATCH_RESERVATION"}
    assert {name for name in passed if name.startswith("SBATCH_")} == kept
    assert f"note: sbatch is run without {', '.join(f'SBATCH_{name}=x' for name in ours.split())}, " in " ".join(
        capsys.readouterr().err.split()
    )


def test_the_printed_file_is_the_submitted_one_and_makes_the_directory_of_its_log(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands(here, monkeypatch, sbatch="echo 7", squeue="", sinfo='echo "low*|6|(null)"')
    shown = printed()
    assert "#SBATCH --cpus-per-task=6" in shown and f"# mkdir -p {here}/runs/tiny/slurm" in shown
    made = tw.submit(TINY, ON_ROWS, to="slurm")
    again = tw.submit(TINY, ON_ROWS, to="slurm", dry_run=True).script
    assert (here / "runs/tiny/slurm/job.sbatch").read_text() == made.script == again
    comments = [[line for line in lines if line.startswith("# ")] for lines in (shown, again.splitlines())]
    assert "mkdir" not in "".join(comments[1])
    assert [line for line in shown if line not in comments[0]] == [
        line for line in again.splitlines() if line not in comments[1]
    ]


def test_each_of_several_jobs_waits_for_the_one_before(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands(here, monkeypatch, sbatch='echo "$@" >>asked; wc -l <asked', squeue="", sinfo="", scontrol="")
    made = tw.submit(TINY, ON_ROWS, to="slurm", jobs=3)
    assert (made.job, made.later) == ("1", ("2", "3")) and [*made.lines()][-3] == "then 2, 3, each after the one before"
    file = here / "runs/tiny/slurm/job.sbatch"
    asked = ["", "--dependency=afterany:1 ", "--dependency=afterany:2 "]
    assert (here / "asked").read_text().splitlines() == [f"--parsable {each}{file}" for each in asked]
    assert made.script.splitlines()[-1].endswith('"$run" "$code" --series')


def test_if_the_last_of_several_jobs_is_refused_none_is_left(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = "echo 'sbatch: error: QOSMaxSubmitJobPerUserLimit' >&2; exit 1"
    row = f"trainwright:{here}/runs/tiny"
    commands(
        here,
        monkeypatch,
        sbatch=f"echo >>taken; [ $(wc -l <taken) -lt 3 ] || {{ {refused}; }}; wc -l <taken",
        squeue=f'[ ! -e taken ] || for i in 1 2; do echo "$i|$i|N/A|PENDING|Dependency|N/A||{row}"; done',
        scancel='echo "$@" >>canceled',
        sinfo="",
    )
    with pytest.raises(RequestError, match="QOSMaxSubmitJobPerUserLimit; --jobs: so are canceled the 2 that it took"):
        tw.submit(TINY, ON_ROWS, to="slurm", jobs=3)
    assert (here / "canceled").read_text() == "1 2\n" and not (here / "runs" / "tiny").exists()


@pytest.mark.parametrize(("code", "canceled"), [(0, True), (4, True), (75, False), (5, False)])
def test_later_jobs_are_canceled_when_the_run_does_not_go_on(
    code: int, canceled: bool, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = here / "runs" / "tiny"
    (run / "slurm").mkdir(parents=True)
    (run / "events.jsonl").write_text('{"event": "finish", "time": 1.0, "status": "finished"}\n')
    rows = [f"{job}|{job}|N/A|{state}|x|N/A||trainwright:{run}" for job, state in ((7, "RUNNING"), (8, "PENDING"))]
    commands(here, monkeypatch, squeue=f"printf '%s\\n' '{rows[0]}' '{rows[1]}'", scancel='echo "$@" >>canceled')
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(sys, "argv", ["requeue", str(run), str(code), "--series"])
    with pytest.raises(SystemExit, match=str(code)):
        job_step.main()
    assert (here / "canceled").exists() is canceled
    assert not canceled or (here / "canceled").read_text() == "8\n"


def an_array_in_the_queue(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The array 12: its elements 0 and 1 run until they are asked to stop, and 4 to 6 wait. Return its directory."""
    seeds = here / "runs" / "seeds"
    (seeds / "slurm").mkdir(parents=True)
    for index in "01":
        (seeds / index).mkdir()
        (seeds / index / "recipe.yaml").write_text("task: sft\n")
        (seeds / index / "events.jsonl").write_text('{"event": "finish", "time": 1.0, "status": "stopped"}\n')
    line = f"trainwright:{seeds}"
    squeue = (
        f'case " $* " in *" --array "*) waiting="4 5 6";; *) waiting=4-6%4;; esac\n'
        f'[ -e canceled ] || for i in $waiting; do echo "12|12|$i|PENDING|Priority|N/A||{line}"; done\n'
        f'for i in 0 1; do [ -e {seeds}/$i/stop ] || echo "1$i|12|$i|RUNNING|None|N/A|n1|{line}"; done'
    )
    over = "echo '12_1: Job has already finished' >&2; exit 1"  # meanwhile
    scancel, scontrol = 'echo "$@" >>canceled', f'echo "$@" >>changed; {over}'
    commands(here, monkeypatch, squeue=squeue, scancel=scancel, scontrol=scontrol)
    return seeds


def test_stop_ends_what_waits_and_what_runs_of_an_array(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = an_array_in_the_queue(here, monkeypatch)
    assert tw.stop("runs/seeds") == "3 canceled, 2 stopped"
    assert (here / "canceled").read_text() == "12_[4,5,6]\n"
    assert (here / "changed").read_text() == "update JobId=12_0,12_1 Requeue=0\n"
    assert (seeds / "0" / "stop").exists() and (seeds / "1" / "stop").exists()
    with pytest.raises(RequestError, match="runs/seeds: no job in the queue trains this run, or a run in this"):
        tw.stop("runs/seeds")


def test_stop_ends_one_element_of_an_array(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = an_array_in_the_queue(here, monkeypatch)
    assert tw.stop(seeds / "1") == "stopped" and not (here / "canceled").exists()
    assert tw.stop("runs/seeds/5") == "canceled" and (here / "canceled").read_text() == "12_5\n"
    assert (here / "changed").read_text() == "update JobId=12_1 Requeue=0\n" and not (seeds / "0" / "stop").exists()


def test_stop_cancels_a_job_whose_run_has_not_begun(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its start removes a file that asks to stop."""
    (here / "runs" / "tiny" / "slurm").mkdir(parents=True)
    line = f"7|7|N/A|RUNNING|None|N/A|n1|trainwright:{here}/runs/tiny"
    commands(here, monkeypatch, squeue=f'[ -e canceled ] || echo "{line}"', scancel='echo "$@" >canceled')
    assert tw.stop("runs/tiny") == "canceled" and (here / "canceled").read_text() == "7\n"


def test_a_run_of_an_array_that_waits_is_not_submitted_again(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = an_array_in_the_queue(here, monkeypatch)
    for run, array, name in ((seeds / "5", None, "12_5"), (seeds, "0-9", "12_4")):
        with pytest.raises(RequestError, match=rf"job {name} of .* or end it with: trainwright stop {run}$"):
            tw.submit(TINY, ON_ROWS, f"logging.run_directory={run}", to="slurm", array=array)
    assert not (seeds / "slurm" / "job.sbatch").exists()


def test_a_controller_that_restarts_is_asked_again(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    away = "echo 'slurm_load_jobs error: Unable to contact slurm controller (connect failure)' >&2; exit 1"
    answer = 'case $1 in show) echo JobState=RUNNING;; *) echo "$@" >>asked;; esac'
    commands(here, monkeypatch, scontrol=f"echo >>tries; [ $(wc -l <tries) -gt 2 ] || {{ {away}; }}; {answer}")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(job_step, "_AGAIN_SECONDS", 0.01)
    monkeypatch.setattr(sys, "argv", ["requeue", str(here / "run"), "75", "--until-done"])
    with pytest.raises(SystemExit, match="75"):
        job_step.main()
    assert (here / "asked").read_text() == "requeue 7\n"


def test_the_element_of_an_array_that_starts_last_is_requeued_alone(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm gives it the number of the array, which its commands take for all elements."""
    show = '[ "$4" = 12_3 ] && echo JobState=RUNNING || printf "%s\\n" JobState=RUNNING JobState=COMPLETED'
    commands(here, monkeypatch, scontrol=f'case $1 in show) {show};; *) echo "$@" >>asked;; esac')
    for name, value in {"JOB_ID": "12", "ARRAY_JOB_ID": "12", "ARRAY_TASK_ID": "3"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setattr(sys, "argv", ["requeue", str(here / "run"), "5"])
    with pytest.raises(SystemExit, match="5"):
        job_step.main()
    assert (here / "asked").read_text() == "requeue 12_3\n"


def test_a_job_that_an_array_submits_is_no_element_of_it(here: Path) -> None:
    """Slurm gives a job the variables of the shell that submits it."""
    line = "unset SLURM_ARRAY_JOB_ID SLURM_ARRAY_TASK_ID"
    assert [each for each in printed() if each.startswith(line)]
    assert not [each for each in printed(array="0-3") if each.startswith("unset ")]


@pytest.mark.parametrize(("status", "code"), [("finished", 0), ("stopped", 5), (None, 5)])
def test_a_run_that_has_not_finished_is_no_success(
    status: str | None, code: int, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands(here, monkeypatch, scontrol='[ "$1" = show ] && echo JobState=RUNNING || echo "$@" >>asked')
    events = [
        {"event": "start", "time": 1.0},
        *([{"event": "finish", "time": 2.0, "status": status}] if status else []),
    ]
    (here / "run").mkdir()
    if status is not None:  # without one, no launch has come so far
        (here / "run" / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(sys, "argv", ["requeue", str(here / "run"), "0"])
    with pytest.raises(SystemExit) as ended:
        job_step.main()
    assert ended.value.code == code and (here / "asked").exists() is (code == 5)


def test_a_task_whose_supervisor_has_died_ends_its_step(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The supervisor is a shell of its name, which is killed."""
    commands(here, monkeypatch, scancel=f'echo "$@" >>{here}/canceled')
    shutil.copy(shutil.which("bash") or "", here / "slurmstepd")
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    task = (
        "import pathlib, time; from trainwright.clusters.slurm.job_step import end_orphaned_step; end_orphaned_step(); "
        "pathlib.Path('ready').touch()\nwhile not pathlib.Path('go').exists(): time.sleep(0.02)\n"
        "pathlib.Path('over').touch()"
    )
    for dies in (False, True):
        for name in ("ready", "go", "over"):
            (here / name).unlink(missing_ok=True)
        supervisor = subprocess.Popen([here / "slurmstepd", "-c", '"$0" -c "$1"; true', sys.executable, task], cwd=here)
        wait_for((here / "ready").exists)
        if dies:
            supervisor.kill()
            supervisor.wait()
        (here / "go").touch()
        wait_for((here / "canceled").exists if dies else (here / "over").exists)
        supervisor.wait()
        assert (here / "canceled").exists() is dies
    assert (here / "canceled").read_text() == "7.0\n"


@pytest.mark.slow
def test_a_stop_that_does_not_fit_into_the_grace_is_told(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint of 8 billion parameters takes minutes; Slurm waits 30 s, and 90 s at a preemption."""
    config, partition = "KillWait                = 30 sec", "PartitionName=gpu Default=YES GraceTime=60"
    commands(here, monkeypatch, scontrol=f'case $2 in config) echo "{config}";; *) echo "{partition}";; esac')
    clusters(here, "big: {machine: 8xH100}\n")
    large = here / "large.yaml"
    large.write_text(
        f"task: sft\nmodel: {{name: meta-llama/Llama-3.1-8B}}\ndata: {{train: {ROWS}, validation: null}}\n"
    )
    made = tw.submit(large, to="big", dry_run=True)
    (warning,) = (line for line in made.lines() if line.startswith("warning: "))
    assert "a stop takes about" in warning and "Slurm kills a job 30 s after its first signal:" in warning
    assert tw.submit(TINY, ON_ROWS, to="big", dry_run=True).warning is None
    found = scheduler.read_grace("gpu")
    assert found is not None and (found.seconds, found.preempted) == (30, 90)
    assert "(90 s when it preempts it, which is enough)" in str(found.warning(60)) and found.warning(20) is None


def test_ends_without_a_new_checkpoint_are_counted(tmp_path: Path) -> None:
    file = tmp_path / "count.json"
    assert [count_failures(tmp_path, file) for _ in range(2)] == [1, 2]
    (tmp_path / "checkpoints" / "step-00000004").mkdir(parents=True)
    assert [count_failures(tmp_path, file) for _ in range(2)] == [0, 1]


def test_jobs_shows_runs_without_a_scheduler(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trainwright.clusters.operations import RunState, format_jobs

    monkeypatch.setenv("PATH", str(here))
    assert tw.jobs() == []
    shown = RunState(Path("runs/a"), "12_3", "running", 5, 10, 0.914, None)
    assert [*format_jobs([shown])][1].split() == ["runs/a", "12_3", "running", "5/10", "91%"]


def test_the_command_prints_the_file(here: Path) -> None:
    words = [sys.executable, "-m", "trainwright", "submit", str(TINY), "--to", "slurm", "--print"]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=100, cwd=here)
    assert done.stdout.startswith("#!/bin/bash\n"), done.stderr
    assert str(ROOT / "src") in done.stdout


def test_what_only_kubernetes_uses_is_refused_for_slurm(here: Path) -> None:
    clusters(here, "big: {image: x}\n")
    with pytest.raises(RequestError, match=r"clusters\.yaml: big\.image is for `scheduler: kubernetes`"):
        tw.submit(TINY, to="big", dry_run=True)
