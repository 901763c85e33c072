"""Stored and shipped traces."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.plan_traces import REGIME, requests
from tests.support.commands import ROOT, environment
from trainwright.errors import RequestError
from trainwright.planning.trace import store, tracing
from trainwright.planning.trace.catalog import look_up_model
from trainwright.planning.trace.request import Device, Regime, TracedModel, TraceRequest
from trainwright.planning.trace.traced import _run_in_child, build_trace_key, size_model
from trainwright.planning.trace.tracing import trace_or_bound
from trainwright.planning.trace.units import BatchShape, ModelTrace, Size

MODEL = "meta-llama/Llama-3.1-8B"
CONFIGURATION = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
SHAPE = BatchShape(2, 128, ((128, 2),), 254, False, False)


WITHOUT_PEFT = """
import importlib.metadata as metadata
installed = metadata.version
def version(name):
    if name == "peft":
        raise metadata.PackageNotFoundError(name)
    return installed(name)
metadata.version = version
"""


@pytest.mark.parametrize("begin", ["", WITHOUT_PEFT], ids=["", "without PEFT"])
def test_a_shipped_trace_is_read_without_torch(begin: str) -> None:
    program = f"""
{begin}
import sys
from trainwright.planning.trace.catalog import look_up_model
from trainwright.planning.trace.units import BatchShape
from bench.plan_traces import requests
from trainwright.planning.trace.request import TracedModel
from trainwright.planning.trace.traced import size_model
for request in requests(TracedModel.of(look_up_model({MODEL!r}).config)):
    size_model(request, BatchShape(1, 8192, ((8192, 1),), 8191, True, False))
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def parts(trace: ModelTrace[Size]) -> tuple[Any, ...]:
    return trace.units, trace.order, trace.facts, trace.reference, trace.reference_copied


@pytest.mark.parametrize(
    "model",
    [
        MODEL,
        "openai-community/gpt2",
        "EleutherAI/gpt-j-6b",
        "EleutherAI/gpt-neo-125m",
        "google/gemma-2-2b",
        "allenai/OLMoE-1B-7B-0924",
    ],
)
def test_shipped_traces_are_those_of_today(model: str) -> None:
    known = look_up_model(model)
    assert known is not None
    request = next(requests(TracedModel.of(known.config)))
    traced = store.to_json(trace_or_bound(request, REGIME))
    shipped = store.read_value(build_trace_key(request, REGIME), request.model.configuration)
    assert parts(store.from_json(traced)) == parts(store.from_json(shipped))


def test_a_trace_reads_back_as_it_was_written() -> None:
    request = TraceRequest(TracedModel.of(CONFIGURATION), Device("cpu"), "fp32", "plain")
    trace = trace_or_bound(request, Regime())
    assert parts(store.from_json(json.loads(json.dumps(store.to_json(trace))))) == parts(trace)


@pytest.mark.parametrize("changed", ["models/linear_losses.py", "planning/trace/fit.py", "planning/search.py"])
def test_a_trace_of_other_code_of_ours_is_not_read(changed: str, tmp_path: Path) -> None:
    store.write_value("a trace", 1)
    copy = Path(shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("*.zip", "__pycache__")))
    with (copy / "trainwright" / changed).open("a") as file:
        file.write("# another version\n")
    program = "from trainwright.planning.trace import store; print(store.read_value('a trace'))"
    environment = {**os.environ, "PYTHONPATH": str(copy)}
    read = subprocess.run(
        [sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, check=True, text=True
    )
    assert read.stdout.strip() == ("1" if changed == "planning/search.py" else "None")


def test_a_model_that_cannot_be_traced_has_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINWRIGHT_CACHE", str(tmp_path))
    request = TraceRequest(TracedModel.of({**CONFIGURATION, "vocab_size": 99}), Device("cpu"), "fp32", "plain")
    exact = size_model(TraceRequest(TracedModel.of(CONFIGURATION), Device("cpu"), "fp32", "plain"), SHAPE)

    def fails(*_: object) -> None:
        raise NotImplementedError("aten.nonzero reads data")

    monkeypatch.setattr(tracing, "trace", fails)
    limited = size_model(request, SHAPE)
    assert limited.facts.failed == "NotImplementedError: aten.nonzero reads data"
    assert [len(unit.parameters) for unit in limited.list_units()] == [
        len(unit.parameters) for unit in exact.list_units()
    ]
    for wide, narrow in zip(limited.list_units()[1:-1], exact.list_units()[1:-1], strict=True):
        assert wide.forward.moments[-1].after > narrow.forward.moments[-1].after


def test_a_trace_in_a_process_of_its_own_gives_its_values_or_its_error() -> None:
    """As it is where torch has a device; see also tests/planning/simulation/test_computing.py."""
    here = os.getpid()
    assert _run_in_child(lambda: {"sizes": [1, 2.5], "apart": os.getpid() != here}) == {
        "sizes": [1, 2.5],
        "apart": True,
    }

    def refused() -> object:
        raise RequestError("model.config: no such thing")

    with pytest.raises(RequestError, match=r"^model\.config: no such thing$"):
        _run_in_child(refused)
    with pytest.raises(RuntimeError, match="ended with status 1"):
        _run_in_child(lambda: {}["nothing"])


WITH_A_DEVICE = """
from tests.support.computing_gpus.__main__ import compute_on
compute_on("1xT4")
import pytest, torch
from tests.planning.trace.test_store import CONFIGURATION, SHAPE
from trainwright.errors import MachineError
from trainwright.planning.trace.request import Device, TracedModel, TraceRequest
from trainwright.planning.trace.traced import _run_in_child, _can_run_backward, size_model

def exact(vocabulary):
    request = TraceRequest(TracedModel.of({**CONFIGURATION, "vocab_size": vocabulary}), Device("cuda"), "bf16")
    return not size_model(request, SHAPE).facts.failed

assert exact(101) and _run_in_child(_can_run_backward)
torch.ones((), requires_grad=True).backward()
assert exact(102) and not _run_in_child(_can_run_backward)
with pytest.raises(MachineError, match="forked from one that has run a backward pass"):
    _run_in_child(lambda: exact(103))
"""


@pytest.mark.slow
def test_where_torch_has_a_device_traces_are_exact_before_and_after_a_backward_pass(tmp_path: Path) -> None:
    """Before it, processes that are forked can run one of their own: those that train."""
    variables = environment(TRAINWRIGHT_CACHE=str(tmp_path))
    ended = subprocess.run([sys.executable, "-c", WITH_A_DEVICE], env=variables, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
