"""The package as a whole: light to import, layered, one version, public names that resolve."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hf_taskvec

ROOT = Path(hf_taskvec.__file__).parent

# Which way imports point: to a lower layer, or within one. A module that is not named here is of the top layer.
LAYERS = [
    {"_version", "errors", "threads"},
    {"names", "tensors", "provenance", "readme", "vocabulary"},
    {"delta", "scratch", "rounding", "arithmetic", "exact", "measure", "compress", "computed", "prune", "vector"},
    {
        "checkpoint",
        "writer",
        "output",
        "store",
        "live",
        "extract",
        "extract_adapter",
        "fit",
        "apply",
        "edit",
        "adapter",
        "combine",
    },
]


def layer(module: str) -> int:
    room = module.split(".")[0]
    return next((number for number, rooms in enumerate(LAYERS) if room in rooms), len(LAYERS))


def modules() -> dict[str, Path]:
    found = {}
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    del found[""]  # the list of public names, which reaches everywhere
    return found


def imports(path: Path) -> set[str]:
    """The modules of this package that a module imports when it is imported itself."""
    found = set()

    def visit(nodes: list[ast.stmt]) -> None:
        for node in nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue  # runs later: how `TaskVector`'s methods open the doors to higher rooms
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
                continue
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path.name}: relative imports hide where an arrow points"
                module = node.module or ""
                found.update([f"{module}.{a.name}" for a in node.names] if module == "hf_taskvec" else [module])
            for block in ("body", "orelse", "finalbody"):
                visit(getattr(node, block, []))

    visit(ast.parse(path.read_text("utf-8")).body)
    return {name.removeprefix("hf_taskvec.") for name in found if name.startswith("hf_taskvec.")}


def test_imports_point_downwards() -> None:
    wrong = [
        f"{module} -> {other}"
        for module, path in modules().items()
        for other in imports(path)
        if layer(other) > layer(module)
    ]
    assert wrong == []


def test_no_circles() -> None:
    arrows = {module: imports(path) & modules().keys() for module, path in modules().items()}
    while leaves := {module for module, others in arrows.items() if not others & arrows.keys()}:
        arrows = {module: others for module, others in arrows.items() if module not in leaves}
    assert arrows == {}


def test_only_the_vector_opens_doors_upwards() -> None:
    """A function-level import of a higher layer is `TaskVector`'s privilege."""
    for module, path in modules().items():
        if module == "vector":
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hf_taskvec."):
                other = (node.module or "").removeprefix("hf_taskvec.")
                assert layer(other) <= layer(module), f"{module} -> {other}"


def test_the_lower_layers_know_neither_transformers_nor_peft() -> None:
    for module, path in modules().items():
        if layer(module) == 2:
            tree = ast.parse(path.read_text("utf-8"))
            hidden = [n for n in ast.walk(tree) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.dump(n.test)]
            skipped = {id(inner) for block in hidden for inner in ast.walk(block)}
            names = [
                (node.module or "") if isinstance(node, ast.ImportFrom) else node.names[0].name
                for node in ast.walk(tree)
                if isinstance(node, ast.Import | ast.ImportFrom) and id(node) not in skipped
            ]
            assert not [name for name in names if name.startswith(("transformers", "peft", "accelerate"))], module


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
