"""`import trainwright` offers the whole API and loads nothing for it."""

from __future__ import annotations

import inspect
import subprocess
import sys

import trainwright as tw
from tests.support.commands import environment


def test_importing_and_listing_loads_nothing() -> None:
    code = (
        "import sys; before = set(sys.modules); import trainwright as tw; dir(tw)\n"
        "print(sorted(name for name in set(sys.modules) - before if name.startswith('trainwright')))\n"
        "tw.Recipe, tw.plan, tw.train, tw.Run, tw.Stopped\n"
        "print([name for name in ('torch', 'transformers', 'numpy', 'pydantic', 'datasets') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True)
    assert found.stdout.splitlines() == ["['trainwright']", "[]"]


def test_everything_public_is_there_listed_and_documented() -> None:
    assert set(tw.__all__) <= set(dir(tw))
    for name in tw.__all__:
        public = getattr(tw, name)
        assert inspect.getdoc(public), name
        if inspect.isfunction(public):
            signature = inspect.signature(public)
            untyped = [p.name for p in signature.parameters.values() if p.annotation is inspect.Parameter.empty]
            assert not untyped and signature.return_annotation is not inspect.Signature.empty, name
            assert ">>> import trainwright as tw" in (public.__doc__ or ""), name


def test_what_is_not_there_is_an_attribute_error() -> None:
    assert not hasattr(tw, "tarin")
