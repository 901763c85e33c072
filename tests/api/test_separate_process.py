"""A call in a process of its own: what it returns, raises, prints, and what becomes of it when that process dies."""

from __future__ import annotations

import operator
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import trainwright as tw
from trainwright.api.separate_process import run_in_process


def test_what_is_returned_and_raised_comes_back() -> None:
    assert run_in_process(operator.add, [1], [2]) == [1, 2] and run_in_process(os.getpid) != os.getpid()
    with pytest.raises(ZeroDivisionError):
        run_in_process(operator.truediv, 1, 0)


def test_what_is_printed_is_shown_where_it_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    run_in_process(print, "hidden")
    run_in_process(print, "shown: ü", progress=True)
    assert capsys.readouterr() == ("shown: ü\n", "")


def test_a_process_that_dies_is_an_error() -> None:
    with pytest.raises(tw.TrainingError, match="ended with exit code 3 and no message"):
        run_in_process(os._exit, 3)
    with pytest.raises(tw.TrainingError, match="ended with exit code -9 and no message"):
        run_in_process(signal.raise_signal, signal.SIGKILL)


def test_what_cannot_be_sent_back_is_an_error_that_says_so() -> None:
    with pytest.raises(tw.TrainingError, match="cannot pickle"):
        run_in_process(threading.Lock)


def test_an_interrupted_call_is_an_interrupt_here() -> None:
    with pytest.raises(KeyboardInterrupt):
        run_in_process(signal.raise_signal, signal.SIGINT)


def test_another_thread_can_call(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as pool, pytest.raises(tw.RequestError, match="is not a run"):
        pool.submit(tw.resume, tmp_path).result()
