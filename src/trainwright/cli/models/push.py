"""``trainwright push``: publish a finished run's model on the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trainwright.errors import MachineError, RequestError
from trainwright.paths import user_path
from trainwright.text import plural, say


def push(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a finished run.")],
    repository: Annotated[str, typer.Argument(metavar="REPO", help="Repository to push to: owner/name.")],
    private: Annotated[bool, typer.Option("--private", help="Create the repository as private.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be uploaded, without uploading.")] = False,
    message: Annotated[str, typer.Option(metavar="TEXT", help="Commit message.")] = "Trained with Trainwright",
) -> None:
    """Publish a run's model with a card that says how it was made.

    The token comes from HF_TOKEN or `hf auth login`, and is never stored.
    """
    weights = _weights(user_path(run))
    if "/" not in repository.strip("/") or repository.count("/") != 1:
        raise RequestError(f"REPO: {repository} is invalid; expected owner/name")
    from trainwright.observe.card import model_card

    card = model_card(user_path(run), repository, weights)
    files = sorted(path for path in weights.rglob("*") if path.is_file() and path.name != "README.md")
    if dry_run:
        _show(repository, weights, files, card)
        return
    _send(repository, weights, card, private, message)


def _weights(run: Path) -> Path:
    if not (run / "recipe.yaml").is_file():
        raise RequestError(f"RUN: {run} is not a run directory: it has no recipe.yaml")
    if not (run / "final").is_dir():
        raise RequestError(
            f"RUN: {run} has no final/: the run is not finished; continue it with trainwright train --resume {run}"
        )
    return run / "final"


def _show(repository: str, weights: Path, files: list[Path], card: str) -> None:
    total = sum(file.stat().st_size for file in files)
    say(
        f"would upload {plural(len(files) + 1, 'file')}, {total / 1000000.0:,.1f} MB, to "
        f"https://huggingface.co/{repository}:"
    )
    for file in files:
        say(f"  {file.stat().st_size / 1e6:>10,.1f} MB  {file.relative_to(weights)}")
    say(f"  {len(card.encode()) / 1e6:>10,.1f} MB  README.md\n")
    say(card, end="")


def _send(repository: str, weights: Path, card: str, private: bool, message: str) -> None:
    from huggingface_hub import CommitOperationAdd, HfApi, constants, get_token
    from huggingface_hub.errors import HfHubHTTPError

    token = get_token()
    if token is None:
        raise RequestError("no token for the Hub: set HF_TOKEN, or log in with `hf auth login`")
    if constants.is_offline_mode():
        raise MachineError("the Hub is disabled by HF_HUB_OFFLINE; unset it, or use --dry-run")
    api = HfApi(token=token)
    from trainwright.observe.card import published_settings

    changed = published_settings(weights)
    operations = [
        CommitOperationAdd(name := str(path.relative_to(weights)), changed.get(name, path))
        for path in sorted(weights.rglob("*"))
        if path.is_file() and path.name != "README.md"
    ]
    operations.append(CommitOperationAdd("README.md", card.encode()))
    try:
        api.create_repo(repository, private=private, exist_ok=True)
        # One commit, so that the repository has all of it or nothing.
        done = api.create_commit(repository, operations, commit_message=message)
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise MachineError(f"{repository}: the Hub refused: {reason.replace(token, '***')}") from error
    say(f"sent: {done.commit_url}")
