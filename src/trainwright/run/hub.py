"""Uploads of models and checkpoints to the Hugging Face Hub."""

from __future__ import annotations

import functools
import json
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from trainwright import __version__
from trainwright.engine.event_reader import EventRecord, describe_precision, read_log
from trainwright.errors import MachineError, RequestError, TrainwrightError
from trainwright.models.adapters.files import BASE, BaseModel
from trainwright.models.resolve_model import read_hub_token
from trainwright.models.usage import format_evaluation_command, format_generation_code, format_loading_code, is_in_code
from trainwright.recipe.files import read_json
from trainwright.recipe.loading import dump_recipe, load_recipe
from trainwright.recipe.schema import RecipeSchema
from trainwright.run.observers.hooks import ObservedRun
from trainwright.run.process import find_console
from trainwright.utils import text
from trainwright.utils.text import quote_word, say

_LAST_SECONDS = 60.0
_PAUSES = (2.0, 10.0)  # seconds before a failed upload at the end of a run is tried again


def send(repository: str, files: Mapping[str, Path | bytes], private: bool, message: str) -> str:
    """Upload files in one commit, so that the repository has all of them or none; return the URL of the commit.

    Raises:
        RequestError: there is no token.
        MachineError: the Hub is not reachable or refuses.
    """
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.errors import HfHubHTTPError

    token = read_hub_token()
    api = HfApi(token=token)
    try:
        operations = [CommitOperationAdd(name, content) for name, content in files.items()]
        api.create_repo(repository, private=private, exist_ok=True)
        return str(api.create_commit(repository, operations, commit_message=message).commit_url)
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise MachineError(f"{repository}: the Hub refused: {reason.replace(token, '***')}") from error


def list_model_files(weights: Path) -> dict[str, Path]:
    """Return the files of a model by their path in a repository, without the card."""
    files = (path for path in sorted(weights.rglob("*")) if path.is_file() and path.name != "README.md")
    return {str(path.relative_to(weights)): path for path in files}


def send_model(weights: Path, card: str, repository: str, private: bool, message: str) -> str:
    """Upload a model with its card; return the URL of the commit. As ``send``."""
    files: dict[str, Path | bytes] = {
        **list_model_files(weights),
        **build_published_settings(weights),
        "README.md": card.encode(),
    }
    return send(repository, files, private, message)


def push_finished(run: Path, terminal: TextIO) -> None:
    """Upload the model of a run that has just finished if its recipe has a section ``push``.

    A failure is reported with the command that repeats it: the run itself is complete.

    Args:
        terminal: for reports; what was uploaded is printed on the console of this process.
    """
    if (push := load_recipe(run / "recipe.yaml").push) is None:
        return
    weights = run / "final"
    say(f"push: uploading {weights} to {push.repository}", file=terminal)
    for pause in (*_PAUSES, None):
        try:
            card = format_model_card(run, push.repository, weights)
            url = send_model(weights, card, push.repository, push.private, "Trained with Trainwright")
            say(f"push: sent: {url}", file=find_console() or sys.stdout)
            return
        except TrainwrightError as error:
            if pause is not None and isinstance(error, MachineError):
                time.sleep(pause)
                continue
            retry = push_command(run, push.repository, push.private)
            say(f"warning: push: {error}; the run is complete, upload it with {retry}", file=terminal, wrap=False)
            return


def send_checkpoint(checkpoint: Path, repository: str, private: bool) -> str:
    """Upload a checkpoint to ``checkpoints/NAME`` in the repository; return the URL of the commit. As ``send``."""
    files: dict[str, Path | bytes] = {
        f"checkpoints/{checkpoint.name}/{file.relative_to(checkpoint)}": file
        for file in sorted(checkpoint.rglob("*"))
        if file.is_file()
    }
    return send(repository, files, private, f"Checkpoint {checkpoint.name}")


def push_command(run: Path, repository: str, private: bool, step: int | None = None) -> str:
    """Return the command that uploads a run's model, or one of its checkpoints."""
    which = "" if step is None else f" --checkpoint {step}"
    return f"trainwright push {quote_word(run)} {repository}{which}{' --private' if private else ''}"


def build_observer(run: ObservedRun, _: object) -> HubObserver | None:
    """Return the observer that uploads a run's checkpoints, if its section ``push`` asks for it."""
    push = run.recipe.push
    if push is None or not push.checkpoints:
        return None
    report = functools.partial(say, file=find_console() or sys.stderr, wrap=False)
    return HubObserver(run.directory, push.repository, push.private, report)


class HubObserver:
    """Upload the checkpoints of a run in a thread, so that no step waits for it.

    While one is uploaded, only the newest that follows waits. What fails is reported with the command that repeats it;
    the run goes on.
    """

    def __init__(self, run: Path, repository: str, private: bool, report: Callable[[str], None]) -> None:
        self._run, self._repository, self._private, self._report = run, repository, private, report
        self._next: EventRecord | None = None
        self._changed = threading.Condition()
        self._ended = False
        self._thread = threading.Thread(target=self._upload, daemon=True)
        self._thread.start()

    def __call__(self, event: EventRecord) -> None:
        """Upload what a checkpoint event names; at the end of the run wait for the last upload, a minute at most."""
        if event["event"] == "checkpoint":
            with self._changed:
                self._next = event
                self._changed.notify()
        elif event["event"] == "finish":
            with self._changed:
                self._ended = True
                self._changed.notify()
            self._thread.join(_LAST_SECONDS)
            if self._thread.is_alive():
                self._failed(self._step, "the upload had not ended with the run")

    def _upload(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._next is not None or self._ended)
                event, self._next = self._next, None
            if event is None:
                return
            self._step = int(event["step"])
            try:
                send_checkpoint(Path(event["path"]), self._repository, self._private)
            except (MachineError, RequestError) as error:
                self._failed(self._step, str(error))

    def _failed(self, step: int, why: str) -> None:
        retry = push_command(self._run, self._repository, self._private, step)
        self._report(f"warning: push: the checkpoint of step {step} was not uploaded: {why}; upload it with {retry}")


_POINTS = 12  # of the curve


def format_model_card(run: Path, name: str, weights: Path) -> str:
    """Return Markdown with the front matter that the Hub reads (huggingface.co/docs/hub/model-cards).

    Args:
        run: the directory of a finished run.
        name: the heading of the page.
        weights: the directory to publish: a model, or an adapter.

    Raises RequestError if the run has no events that can be read.
    """
    recipe, log = load_recipe(run / "recipe.yaml"), read_log(run / "events.jsonl")
    events = log.history
    start = next((event for event in reversed(events) if event["event"] == "start" and "max_steps" in event), None)
    if start is None:
        why = "; ".join(log.damage[:1]) or "events.jsonl has no start of a run"
        raise RequestError(f"{run}: no card can be written without its events: {why}")
    is_adapter = (weights / "adapter_config.json").is_file()
    base = BaseModel.read(weights) if is_adapter else None
    sections = [
        "\n".join(["---", *_iterate_front_matter(recipe, start, is_adapter), "---"]),
        f"# {name}",
        _format_introduction(recipe, start, is_adapter, base),
        "## Use\n\n" + _format_usage(recipe, name, weights),
        "## Measured\n\n" + "\n".join(_format_metrics(events)),
        "## Loss\n\n" + "\n".join(_format_curve(events)),
        "## Data\n\n" + "\n".join(f"- {line}" for line in start.get("data", []) if "tokens kept in" not in line),
        f"## Recipe\n\n```yaml\n{dump_recipe(_remove_local_keys(recipe)).strip()}\n```",
        f"Trained with Trainwright {__version__}.",
    ]
    return _remove_paths("\n\n".join(sections) + "\n", recipe, *([] if base is None else [base.name]))


def _iterate_front_matter(recipe: RecipeSchema, start: EventRecord, is_adapter: bool) -> Iterator[str]:
    if recipe.has_texts:
        yield f"library_name: {'peft' if is_adapter else 'transformers'}"
        yield "pipeline_tag: text-generation"
    else:
        yield "pipeline_tag: reinforcement-learning"
    name = recipe.model.name
    # A file that a package ships under a name of the Hub differs from the weights published there.
    is_dequantized = recipe.model.gguf_file is None and "dequantized" in start.get("weights", "")
    if name is not None and not (_is_absolute(name) or Path(name).exists() or is_dequantized):
        yield f"base_model: {name}"
        yield f"base_model_relation: {'adapter' if is_adapter else 'finetune'}"
    yield "tags:"
    yield "- trainwright"
    yield f"- {recipe.task}"


def _format_introduction(recipe: RecipeSchema, start: EventRecord, is_adapter: bool, base: BaseModel | None) -> str:
    subject = f"An adapter ({recipe.model.adapter.type})" if is_adapter else "A model"
    name = recipe.model.name
    is_gguf = "dequantized" in start.get("weights", "")
    of = start.get("weights", "a randomly initialized model") if name is None or is_gguf else name
    if base is not None:
        of = str(base)
    steps, devices = start.get("max_steps"), start.get("world_size", 1)
    batch = f"{recipe.train.global_batch_size} {recipe.train.batch_unit}"
    return (
        f"{subject} made from {of} by {recipe.task}: {steps:,} steps of {batch} on "
        f"{devices} x {start.get('device', 'one device')} ({start.get('strategy')}, "
        f"{describe_precision(start)}); {text.format_count(start.get('parameters', 0))} "
        f"parameters, {text.format_count(start.get('trainable_parameters', 0))} of them trained."
    )


def _format_usage(recipe: RecipeSchema, name: str, weights: Path) -> str:
    if not recipe.has_texts:
        has_own_code = is_in_code(weights)
        note = "Its environment is code that the recipe below names; save the recipe as `agent/recipe.yaml`.\n\n"
        download = f"hf download {name} --local-dir {'agent/final' if has_own_code else 'agent'}"
        return note * has_own_code + f"```sh\n{download}\n{format_evaluation_command(weights, 'agent')}\n```"
    lines = format_loading_code(weights, name, published=True)
    if lines is None:
        return (
            "The adapter's base model is randomly initialized and exists only in its run. Merge the adapter, and "
            "publish the merged model: `trainwright merge RUN --out DIRECTORY`."
        )
    return f"```python\n{lines}\n\n{format_generation_code(weights)}\n```"


def _format_metrics(events: Sequence[EventRecord]) -> Iterator[str]:
    evaluations = [event for event in events if event["event"] == "evaluate"]
    if not evaluations:
        yield "No evaluation on held-out data."
        return
    first, last = evaluations[0], evaluations[-1]
    yield f"| on held-out data | before (step {first['step']}) | after (step {last['step']}) |"
    yield "| --- | --- | --- |"
    for name, value in last["metrics"].items():
        before = first["metrics"].get(name)
        yield (
            f"| {text.format_metric_name(name)} | {'-' if before is None else text.format_metric(before)} | "
            f"{text.format_metric(value)} |"
        )


def _format_curve(events: Sequence[EventRecord]) -> Iterator[str]:
    steps = [event for event in events if event["event"] == "step"]
    held_out = {event["step"]: event["metrics"].get("loss") for event in events if event["event"] == "evaluate"}
    indices = {round(i * (len(steps) - 1) / max(1, _POINTS - 1)) for i in range(_POINTS)} if steps else set()
    indices |= {i for i, event in enumerate(steps) if event["step"] in held_out}
    yield "| step | training loss | held-out loss |"
    yield "| --- | --- | --- |"
    for i in sorted(indices):
        event = steps[i]
        loss = held_out.get(event["step"])
        yield (
            f"| {event['step']:,} | {text.format_metric(event['loss'])} | "
            f"{'' if loss is None else text.format_metric(loss)} |"
        )


def _remove_local_keys(recipe: RecipeSchema) -> RecipeSchema:
    """Return the recipe without what belongs to the place where it ran: its job, its copies and its ports."""
    checkpoint = recipe.checkpoint.model_copy(update={"copies": []})
    # Options of observers, such as a port, are of that place too.
    observers = {name: setting for name, setting in recipe.logging.observers.items() if not isinstance(setting, dict)}
    logging = recipe.logging.model_copy(update={"observers": observers})
    return recipe.model_copy(update={"launch": None, "push": None, "checkpoint": checkpoint, "logging": logging})


def _remove_paths(card: str, recipe: RecipeSchema, *more: str) -> str:
    """Return the card without paths of the machine that trained it: only their last component remains."""
    for path in sorted(_find_paths([recipe.model_dump(), more]), key=len, reverse=True):
        card = card.replace(path, Path(path).name)
    return card


def build_published_settings(weights: Path) -> dict[str, bytes]:
    """Return the adapter's files that name its base model, by file name, without the local path of the base."""
    files = {}
    for name in ("adapter_config.json", BASE):
        if (weights / name).is_file():
            values = read_json(weights / name)
            for path in _find_paths(values):
                values = {key: Path(path).name if value == path else value for key, value in values.items()}
            files[name] = (json.dumps(values, indent=2) + "\n").encode()
    return files


def _is_absolute(text: str) -> bool:
    """Return whether it is a path from the root or from a user's home directory, which need not exist here."""
    return Path(text).is_absolute() or re.match(r"~[\w.-]*/", text) is not None


def _find_paths(value: Any) -> set[str]:
    """Return all absolute paths in a recipe's values."""
    if isinstance(value, str):
        return {value} if _is_absolute(value) and Path(value).name else set()
    values = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return set().union(*map(_find_paths, values))
