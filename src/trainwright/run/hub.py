"""Uploads of models and checkpoints to the Hugging Face Hub."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from trainwright.engine.event_reader import EventRecord
from trainwright.errors import MachineError, RequestError
from trainwright.models.resolve_model import hub_token
from trainwright.run.observers.hooks import ObservedRun
from trainwright.run.process import console
from trainwright.utils.text import quoted, say

_LAST_SECONDS = 60.0


def send(repository: str, files: Mapping[str, Path | bytes], private: bool, message: str) -> str:
    """Upload files in one commit, so that the repository has all of them or none; return the URL of the commit.

    Raises:
        RequestError: there is no token.
        MachineError: the Hub is not reachable or refuses.
    """
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.errors import HfHubHTTPError

    token = hub_token()
    api = HfApi(token=token)
    try:
        operations = [CommitOperationAdd(name, content) for name, content in files.items()]
        api.create_repo(repository, private=private, exist_ok=True)
        return str(api.create_commit(repository, operations, commit_message=message).commit_url)
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise MachineError(f"{repository}: the Hub refused: {reason.replace(token, '***')}") from error


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
    return f"trainwright push {quoted(run)} {repository}{which}{' --private' if private else ''}"


def of_run(run: ObservedRun, _: object) -> HubObserver | None:
    """Return the observer that uploads a run's checkpoints, if its section ``push`` asks for it."""
    push = run.recipe.push
    if push is None or not push.checkpoints:
        return None
    report = functools.partial(say, file=console() or sys.stderr, wrap=False)
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
        again = push_command(self._run, self._repository, self._private, step)
        self._report(f"warning: push: the checkpoint of step {step} was not uploaded: {why}; upload it with {again}")
