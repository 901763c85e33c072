"""Registries: what is built in, what installed packages add, and ``module:Name``."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from operator import attrgetter
from pathlib import Path

import pytest

from trainwright.errors import RequestError
from trainwright.recipe import extensions, registries
from trainwright.recipe.extensions import Registry

Install = Callable[[str, str, str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Put a package of one module and its entry points on the path: ``install(name, source, entries)``."""

    def put(name: str, source: str, entries: str) -> None:
        module = name.replace("-", "_")
        (tmp_path / f"{module}.py").write_text(source)
        information = tmp_path / f"{module}-1.0.dist-info"
        information.mkdir()
        (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (information / "entry_points.txt").write_text(f"[trainwright.tests]\n{entries}\n")

    monkeypatch.setattr("sys.path", [str(tmp_path), *sys.path])
    modules = {*sys.modules}
    extensions._list_entry_points.cache_clear()
    yield put
    extensions._list_entry_points.cache_clear()
    for name in {*sys.modules} - modules:
        del sys.modules[name]


def _registry() -> Registry[object]:
    return Registry("trainwright.tests", {"ours": "fractions:Fraction"}, "test", ("numerator",))


def test_what_is_built_in_and_what_is_registered_is_found_by_name(install: Install) -> None:
    install("extra-package", "class Half:\n    numerator = 1\n", "half = extra_package:Half")
    registry = _registry()
    assert registry.names() == ("ours", "half")
    assert (registry.package("ours"), registry.package("half")) == (None, "extra-package")
    assert "extra_package" not in sys.modules and registry.get("half").numerator == 1  # type: ignore[attr-defined]
    assert registry.get("half") is registry.get("extra_package:Half")


def test_a_place_needs_no_registration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "named_by_place.py").write_text("class Outer:\n    class Inner:\n        numerator = 2\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [path for path in sys.path if path != str(tmp_path)])
    assert _registry().get("named_by_place:Outer.Inner").numerator == 2  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("source", "entries", "name", "said"),
    [
        (
            "import no_such_library",
            "half = faulty:Half",
            "half",
            "package faulty: test half (entry point faulty:Half of trainwright.tests) cannot be imported: No module "
            "named 'no_such_library'",
        ),
        (
            "class Half: pass",
            "half = faulty:Half",
            "half",
            "package faulty: test half (entry point faulty:Half of trainwright.tests) lacks numerator",
        ),
        (
            "",
            "half = faulty:Half",
            "half",
            "package faulty: test half (entry point faulty:Half of trainwright.tests) cannot be imported: module "
            "'faulty' has no attribute 'Half'",
        ),
        (
            "raise KeyError('setting')",
            "half = faulty:Half",
            "half",
            "cannot be imported: KeyError: 'setting'",
        ),
        (
            "",
            "ours = faulty:Half",
            "ours",
            "package faulty: test ours (entry point faulty:Half of trainwright.tests) is also registered by "
            "trainwright itself",
        ),
        ("", "half = faulty:Half", "halve", "unknown test 'halve'; did you mean half?"),
        ("", "half = faulty:Half", "x", "unknown test 'x'; choose from ours, half, or use file.py:Name or module:Name"),
        ("", "half = faulty:Half", "faulty:", "test faulty:: expected package.module:Name"),
        ("", "half = faulty:Half", "nowhere:Half", "test nowhere:Half cannot be imported: No module named 'nowhere'"),
    ],
)
def test_a_faulty_extension_is_refused_with_its_package_and_entry_point(
    install: Install, source: str, entries: str, name: str, said: str
) -> None:
    install("faulty", source, entries)
    with pytest.raises(RequestError) as refused:
        _registry().get(name)
    assert said in str(refused.value) and refused.value.exit_code == 2


def test_two_packages_with_one_name_are_refused(install: Install) -> None:
    install("first", "class Half:\n    numerator = 1\n", "half = first:Half")
    install("second", "class Half:\n    numerator = 1\n", "half = second:Half")
    registry = _registry()
    for ask in (registry.names, lambda: registry.get("half"), lambda: registry.get("ours")):
        with pytest.raises(RequestError) as refused:
            ask()
        said = str(refused.value)
        assert "package first" in said and "package second" in said and "uninstall or rename one" in said


def test_what_built_in_specs_name_exists() -> None:
    for registry in (value for value in vars(registries).values() if isinstance(value, Registry)):
        for spec in map(registry.get, registry.names()):
            for text in vars(spec).values() if hasattr(spec, "__dict__") else ():
                if isinstance(text, str) and re.fullmatch(r"trainwright[\w.]*:[\w.]+", text):
                    module, _, attribute = text.partition(":")
                    assert attrgetter(attribute)(import_module(module)) is not None
