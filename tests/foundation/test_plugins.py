"""What other packages add: a real package, built and installed into a folder on the path."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.example_vectors import some_vectors

from hf_taskvec import combine, rules
from hf_taskvec.auditing.audit_run import checked_attacks
from hf_taskvec.errors import MissingNameError, UnsupportedError
from hf_taskvec.evaluation import protocols
from hf_taskvec.evaluation.scoring.metrics import own_metric
from hf_taskvec.merging import rule_registry
from hf_taskvec.plugins import _found, plugin, plugin_names

SOURCE = Path(__file__).resolve().parents[1] / "support" / "example_plugins"


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--disable-pip-version-check", "--no-index"]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, "--target", folder, SOURCE], check=True)
    assert (folder / "example_plugins-1.2.dist-info" / "entry_points.txt").exists()
    return folder


@pytest.fixture
def on_the_path(installed: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(installed)
    _found.cache_clear()
    yield
    _found.cache_clear()
    sys.modules.pop("example_plugins", None)
    rule_registry._RULES.pop("strongest", None)


def test_nothing_is_added_where_nothing_is_installed() -> None:
    assert not plugin_names("rules") and "strongest" not in rules()


@pytest.mark.usefixtures("on_the_path")
def test_each_kind_is_found_by_its_name() -> None:
    assert plugin_names("rules") == ["missing", "strongest", "unregistered"] and "example_plugins" not in sys.modules
    a, b = some_vectors(2)
    merged = combine([a, b], "strongest")
    name = next(iter(a))
    one, other = a.dense(name), b.dense(name)
    assert (merged.dense(name) == one.where(one.abs() > other.abs(), other)).all()
    assert merged.provenance.rules == (("strongest", "https://example.org/strongest"),)
    assert protocols.get("short").prompt_length == 8 and protocols.names()[-1] == "short"
    assert own_metric("shouting").definition == "the share of capital letters in the output"
    assert checked_attacks(["relearn", "again"]) == ["relearn", "again"]


@pytest.mark.usefixtures("on_the_path")
def test_what_is_broken_names_its_package() -> None:
    with pytest.raises(UnsupportedError, match=r"example-plugins 1\.2 adds 'missing', but cannot be imported"):
        combine(some_vectors(2), "missing")
    with pytest.raises(UnsupportedError, match=r"adds 'unregistered', which is not a function with the decorator"):
        combine(some_vectors(2), "unregistered")
    with pytest.raises(MissingNameError, match="Did you mean 'strongest'"):
        combine(some_vectors(2), "strongst")
    with pytest.raises(MissingNameError, match=r"adds a metric 'shoutin'.*Did you mean 'shouting'"):
        own_metric("shoutin")
    with pytest.raises(UnsupportedError, match="which is not a number"):
        plugin("metrics", "shouting", lambda found: isinstance(found, int), "a number")


@pytest.mark.usefixtures("on_the_path")
def test_a_name_of_two_packages_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "other-1.0.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (other / "entry_points.txt").write_text("[hf_taskvec.protocols]\nshort = other:short\n")
    monkeypatch.syspath_prepend(tmp_path)
    _found.cache_clear()
    with pytest.raises(UnsupportedError, match=r"'short' is added by several packages \(.*other:short"):
        protocols.get("short")


def test_importing_the_library_looks_for_no_plugins() -> None:
    code = "import sys, hf_taskvec; print('importlib.metadata' in sys.modules, 'hf_taskvec.plugins' in sys.modules)"
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, cwd=SOURCE.parents[2])
    assert done.stdout.split() == ["False", "False"], done.stderr
