"""The package as a whole: light to import, one version, public names that resolve, one name for one thing."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hf_taskvec

ROOT = Path(hf_taskvec.__file__).parent


def modules() -> dict[str, Path]:
    found = {}
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    del found[""]  # the list of public names, which reaches everywhere
    return found


def imported_at_import(path: Path) -> set[str]:
    """The modules of this package that a module imports when it is imported itself."""
    found = set()

    def visit(nodes: list[ast.stmt]) -> None:
        for node in nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
                continue
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                found.update([node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)])
            for block in ("body", "orelse", "finalbody"):
                visit(getattr(node, block, []))

    visit(ast.parse(path.read_text("utf-8")).body)
    return {name.removeprefix("hf_taskvec.") for name in found if name.startswith("hf_taskvec.")}


def test_no_module_imports_itself_by_way_of_others() -> None:
    """import-linter keeps circles between packages away; these are those within one."""
    arrows = {module: imported_at_import(path) & modules().keys() for module, path in modules().items()}
    for module, others in arrows.items():  # what a package's __init__ imports of its own is no circle
        others.discard(module.rpartition(".")[0])
    while leaves := {module for module, others in arrows.items() if not others & arrows.keys()}:
        arrows = {module: others for module, others in arrows.items() if module not in leaves}
    assert arrows == {}


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


HEAVY = "print(sorted({m.split('.')[0] for m in sys.modules} & {'torch', 'transformers', 'peft', 'numpy', 'datasets'}))"


def test_importing_the_package_is_light() -> None:
    assert run(f"import sys, hf_taskvec; hf_taskvec.__version__; dir(hf_taskvec); {HEAVY}") == "[]"


def test_algebra_needs_neither_transformers_nor_peft() -> None:
    code = "v = TaskVector.from_tensors({'w': torch.eye(4)}); (v - 2 * v).compress(rank=1).norm(); print(v)"
    heavy = run(f"import sys, torch; from hf_taskvec import TaskVector; {code}; {HEAVY}").splitlines()[-1]
    assert "torch" in heavy and "transformers" not in heavy and "peft" not in heavy


def test_full_fine_tunes_need_no_peft(tmp_path: Path) -> None:
    code = f"""
import sys, torch
from safetensors.torch import save_file
from hf_taskvec import TaskVector
from pathlib import Path
for name in ("base", "tuned"):
    folder = Path({str(tmp_path)!r}) / name
    folder.mkdir()
    save_file({{"w": torch.full((2,), float(len(name)))}}, folder / "model.safetensors")
v = TaskVector.from_finetuned(folder.parent / "base", folder)
v.save(folder.parent / "v")
assert TaskVector.load(folder.parent / "v").dense("w").tolist() == [1, 1]
{HEAVY}"""
    heavy = run(code)
    assert "torch" in heavy and "transformers" not in heavy and "peft" not in heavy


def test_public_names_resolve() -> None:
    assert set(hf_taskvec.__all__) == set(dir(hf_taskvec))
    for name in hf_taskvec.__all__:
        assert getattr(hf_taskvec, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'TaskVektor'"):
        hf_taskvec.TaskVektor  # noqa: B018


def test_the_version_is_in_one_place() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.\w+)?", hf_taskvec.__version__)
    holders = [path.name for path in ROOT.rglob("*.py") if hf_taskvec.__version__ in path.read_text("utf-8")]
    assert holders == ["_version.py"]
    project = (ROOT.parent / "pyproject.toml").read_text("utf-8")
    assert '[tool.hatch.version]\npath = "hf_taskvec/_version.py"' in project
    assert f'"{hf_taskvec.__version__}"' not in project


def test_types_are_shipped() -> None:
    assert (ROOT / "py.typed").exists()


def test_every_module_says_what_it_is_for() -> None:
    for module, path in modules().items():
        assert module == "_version" or ast.get_docstring(ast.parse(path.read_text("utf-8"))), module


def test_every_error_is_one_of_ours() -> None:
    """What the library raises itself is of the one family, so that callers need to catch one thing."""
    from hf_taskvec import errors

    family = {name for name, value in vars(errors).items() if isinstance(value, type)}
    allowed = family | {"AssertionError", "AttributeError"}
    for module, path in modules().items():
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and isinstance(node.exc.func, ast.Name):
                name = node.exc.func.id
                assert name in allowed or name.startswith("_") or name.islower(), f"{module} raises {name}"


def defined_names(node: ast.stmt) -> list[str]:
    """The names that a statement of a module gives to classes, functions, constants and types."""
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.Assign(targets=targets):
            parts = [part for target in targets for part in ast.walk(target)]
            return [part.id for part in parts if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)]
        case ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
        case _:
            return []


def public_definitions() -> dict[str, list[str]]:
    """The public classes, functions, constants and types of all modules: name -> the modules that define it."""
    found: dict[str, list[str]] = {}
    for module, path in modules().items():
        for node in ast.parse(path.read_text("utf-8")).body:
            for name in defined_names(node):
                if not name.startswith("_"):  # `__all__` neither
                    found.setdefault(name, []).append(module)
    return found


def test_no_two_things_share_a_name() -> None:
    assert {name: where for name, where in public_definitions().items() if len(where) > 1} == {}


def test_no_module_is_longer_than_500_lines_and_no_line_than_120_characters() -> None:
    for path in [*ROOT.rglob("*.py"), *(ROOT.parent / "recipes").rglob("*.py")]:
        lines = path.read_text("utf-8").splitlines()
        assert len(lines) <= 500, path
        assert not [number for number, line in enumerate(lines, 1) if len(line) > 120], path


def test_the_names_of_files_are_spelt_in_one_place() -> None:
    """Elsewhere they are constants of `filenames`; prose in docstrings and messages may name them."""
    from hf_taskvec import filenames

    names = {
        value
        for value in vars(filenames).values()
        if isinstance(value, str) and value.startswith(("taskvec", "adapter_"))
    }
    assert len(names) >= 5
    for module, path in modules().items():
        if module == "filenames":
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Constant):
                assert node.value not in names, f"{module} spells {node.value!r}"
