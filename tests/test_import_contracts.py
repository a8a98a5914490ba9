"""The contracts of import-linter hold for the package as it is, and each fails when something breaks it."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = Path("hf_taskvec")


def append(file: str, text: str) -> Callable[[Path], None]:
    def plant(root: Path) -> None:
        path = root / PACKAGE / file
        path.write_text(path.read_text("utf-8") + text, "utf-8")

    return plant


def new_package(root: Path) -> None:
    (root / PACKAGE / "gardening").mkdir()
    (root / PACKAGE / "gardening" / "__init__.py").write_text('"""A package that no layer lists."""\n', "utf-8")


def remove_an_upward_import(root: Path) -> None:
    path = root / PACKAGE / "algebra" / "vector_constructors.py"
    text = path.read_text("utf-8")
    line = "        from hf_taskvec.analysis.gradients import from_gradient\n"
    assert line in text
    path.write_text(text.replace(line, ""), "utf-8")


LAYERS = "Imports point downwards, and peers do not import each other BROKEN"
ALGEBRA = "The algebra knows no library of models BROKEN"
STEPS = "Evaluation: texts, then asking the model, then scoring and reporting BROKEN"

PLANTED = {
    "an import of a higher layer": append("models/layout.py", "\nimport hf_taskvec.training.settings\n"),
    "one inside a function": append(
        "files/output_folder.py",
        "\n\ndef planted() -> None:\n    from hf_taskvec.cli import app\n\n    app\n",
    ),
    "one for types only": append(
        "merging/combining.py",
        "\nfrom typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    from hf_taskvec.evaluation import sweep\n",
    ),
    "an import of a peer": append("training/settings.py", "\nimport hf_taskvec.evaluation\n"),
    "an import of transformers in the algebra": append("algebra/sums.py", "\nimport transformers\n"),
    "one of datasets inside a function": append(
        "algebra/measures.py", "\n\ndef planted() -> None:\n    import datasets\n\n    datasets\n"
    ),
    "a package that is not listed": new_package,
    "a step of the evaluation that reaches back": append(
        "evaluation/texts/books.py", "\nimport hf_taskvec.evaluation.sweeping\n"
    ),
    "an exemption that is no longer needed": remove_an_upward_import,
}


def lint(root: Path) -> subprocess.CompletedProcess[str]:
    code = (
        "import sys; sys.path.insert(0, ''); from importlinter.cli import lint_imports_command; lint_imports_command()"
    )
    return subprocess.run([sys.executable, "-c", code, "--no-cache"], cwd=root, capture_output=True, text=True)


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("contracts")
    shutil.copytree(ROOT / PACKAGE, root / PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", root)
    return root


def test_the_package_keeps_its_contracts(copied: Path) -> None:
    pytest.importorskip("importlinter")
    done = lint(copied)
    assert done.returncode == 0, done.stdout


FOUND_BY = {
    "an import of transformers in the algebra": ALGEBRA,
    "one of datasets inside a function": ALGEBRA,
    "a step of the evaluation that reaches back": STEPS,
    "an exemption that is no longer needed": "No matches for ignored import",
}


@pytest.mark.parametrize("planted", PLANTED)
def test_a_planted_violation_is_found(copied: Path, tmp_path: Path, planted: str) -> None:
    pytest.importorskip("importlinter")
    shutil.copytree(copied, tmp_path, dirs_exist_ok=True)
    PLANTED[planted](tmp_path)
    done = lint(tmp_path)
    said = " ".join((done.stdout + done.stderr).split())
    assert done.returncode != 0 and FOUND_BY.get(planted, LAYERS) in said, said
