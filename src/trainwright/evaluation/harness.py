"""Tasks of lm-evaluation-harness, on a model that is loaded here and on all ranks.

Rank 0 runs the harness (https://github.com/EleutherAI/lm-evaluation-harness) and sends its requests to all ranks, which
share the work.
"""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from trainwright.data.rows.bounded import tokenized
from trainwright.data.tokens.dataset import TokenDataset
from trainwright.errors import RequestError, TrainwrightError
from trainwright.inference.answering import answer_all
from trainwright.inference.batching import Stage
from trainwright.inference.loading import Loaded
from trainwright.inference.sampling import Sampling
from trainwright.inference.scoring import score
from trainwright.inference.stopping import stop_of
from trainwright.parallel.world import World

_POSITIONS = 2048  # of a model that does not state its number of positions
_NEW_TOKENS = 256  # if a task does not set it


def run_tasks(
    loaded: Loaded,
    tasks: Sequence[str],
    directory: str | None,
    limit: int | None,
    world: World,
    stage: Stage,
) -> dict[str, dict[str, Any]]:
    """Return the harness's metrics by task; empty on ranks other than 0. Every rank must call.

    Args:
        directory: with definitions of additional tasks.
        limit: rows of every task.

    Raises:
        RequestError: a task is unknown, or its data is not available.
    """
    shared = _Shared(loaded, world, stage)
    if not world.is_main:
        shared.serve()
        return {}
    try:
        return _results(_language_model(shared), tasks, directory, limit)
    finally:
        shared.finish()


class _Shared:
    """Operations of all ranks together, directed by rank 0."""

    def __init__(self, loaded: Loaded, world: World, stage: Stage) -> None:
        self.loaded = loaded
        self._world = world
        self._stage = stage

    def serve(self) -> None:
        """Execute rank 0's operations on the other ranks until it is finished."""
        while (call := self._world.broadcast(None)) is not None:
            name, arguments = call
            getattr(self, f"_{name}")(*arguments)

    def finish(self) -> None:
        self._world.broadcast(None)

    def likelihoods(self, pairs: list[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        """Return for every continuation after its context, in tokens, the log-likelihood and whether it is the greedy
        one.
        """
        self._world.broadcast(("likelihoods", (pairs,)))
        return self._likelihoods(pairs)

    def answers(self, prompts: list[list[int]], sampling: dict[str, Any], until: list[str]) -> list[str]:
        """Return the model's answer to every prompt."""
        self._world.broadcast(("answers", (prompts, sampling, until)))
        return self._answers(prompts, sampling, until)

    def _likelihoods(self, pairs: list[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        examples = [
            (context + continuation, [False] * len(context) + [True] * len(continuation))
            for context, continuation in pairs
        ]
        dataset = TokenDataset.from_examples(examples, "harness")
        rows = score(self.loaded.lm, dataset, self._world, done=self._stage("scoring", len(pairs)))
        return [(-float(row.losses.sum(dtype="float64")), bool(row.correct.all())) for row in rows]

    def _answers(self, prompts: list[list[int]], sampling: dict[str, Any], until: list[str]) -> list[str]:
        tokenizer, lm = self.loaded.tokenizer, self.loaded.lm
        stop = stop_of(lm.model, tokenizer, chat=False).with_texts(until)
        done = self._stage("answers", len(prompts))
        with lm.for_generation() as model:
            found = answer_all(model, tokenizer, prompts, Sampling(**sampling), stop, self._world, done=done)
        return [answer.text for answer in found]


def _language_model(shared: _Shared) -> Any:
    """Return the model with the harness's interface."""
    from lm_eval.api.model import TemplateLM
    from lm_eval.models.utils import normalize_gen_kwargs
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    tokenizer = shared.loaded.tokenizer
    config = shared.loaded.lm.config.get_text_config()
    # The token that is predicted last is fed here, too, so a text has one position less than the model.
    longest = (getattr(config, "max_position_embeddings", None) or _POSITIONS) - 1

    class LanguageModel(TemplateLM):
        @property
        def eot_token_id(self) -> int:
            return int(tokenizer.eos_token_id)

        @property
        def prefix_token_id(self) -> int:
            return self.eot_token_id if tokenizer.bos_token_id is None else int(tokenizer.bos_token_id)

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
            if add_special_tokens is None and string.startswith(str(tokenizer.decode(self.prefix_token_id))):
                add_special_tokens = False
            options = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
            return list(tokenized(tokenizer, [string], **options)["input_ids"][0])

        def _loglikelihood_tokens(self, requests: list[Any], **kwargs: Any) -> list[tuple[float, bool]]:
            pairs = [(context, continuation[-longest:]) for _, context, continuation in requests]
            return shared.likelihoods([(context[-max(1, longest - len(after)) :], after) for context, after in pairs])

        def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
            windows = [
                [
                    make_disjoint_window(window)
                    for window in get_rolling_token_windows(
                        self.tok_encode(request.args[0]), self.prefix_token_id, longest - 1, context_len=1
                    )
                ]
                for request in requests
            ]
            found = iter(shared.likelihoods([window for each in windows for window in each]))
            return [sum(next(found)[0] for _ in each) for each in windows]

        def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
            texts: dict[int, str] = {}
            alike: dict[str, list[int]] = defaultdict(list)
            for index, request in enumerate(requests):
                alike[repr(request.args[1])].append(index)
            for indices in alike.values():
                settings = normalize_gen_kwargs(dict(requests[indices[0]].args[1]), _NEW_TOKENS)
                sampling = _sampling(settings)
                prompt_limit = longest + 1 - sampling.max_new_tokens
                if prompt_limit < 1:
                    raise RequestError(
                        f"--lm-eval: answers of {sampling.max_new_tokens} tokens are longer than the model"
                    )
                prompts = [self.tok_encode(requests[index].args[0])[-prompt_limit:] for index in indices]
                found = shared.answers(prompts, asdict(sampling), list(settings["until"]))
                texts.update(zip(indices, found, strict=True))
            return [texts[index] for index in range(len(requests))]

    return LanguageModel()


def _sampling(settings: dict[str, Any]) -> Sampling:
    """Return the sampling settings of a task. Raises RequestError for unsupported ones."""
    known = {"until", "max_gen_toks", "do_sample", "temperature", "top_p", "top_k"}
    if unknown := [key for key, value in settings.items() if key not in known and value is not None]:
        raise RequestError(f"--lm-eval: the task sets {', '.join(unknown)} for its answers, which is not supported")
    return Sampling(
        max_new_tokens=int(settings["max_gen_toks"]),
        temperature=float(settings.get("temperature") or 0.0) if settings.get("do_sample") else 0.0,
        top_p=float(settings.get("top_p") or 1.0),
        top_k=settings.get("top_k") or None,
    )


def _results(model: Any, tasks: Sequence[str], directory: str | None, limit: int | None) -> dict[str, dict[str, Any]]:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=directory)
    for task in tasks:
        if task not in manager.all_tasks:
            near = difflib.get_close_matches(task, manager.all_tasks, n=3)
            hint = f"; did you mean {', '.join(near)}?" if near else ""
            raise RequestError(f"--lm-eval: lm-evaluation-harness has no task {task}{hint}")
    try:
        found = simple_evaluate(model, tasks=list(tasks), task_manager=manager, limit=limit, log_samples=False)
    except TrainwrightError:
        raise
    except (OSError, ConnectionError, ValueError) as error:  # of the datasets library and of the Hub's client
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise RequestError(f"--lm-eval {','.join(tasks)}: the tasks' data cannot be loaded: {reason}") from error
    return {task: dict(metrics) for task, metrics in found["results"].items()}
