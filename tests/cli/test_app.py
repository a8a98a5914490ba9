"""The application: its commands and their files, their help, and what happens to errors."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.command_line import COMMANDS, OF_OTHERS, Run
from support.edited_model import Edited
from support.tiny_models import TinyModels

import hf_taskvec.cli
from hf_taskvec import TaskVector
from hf_taskvec.cli import main
from hf_taskvec.cli.app import app

FILES = {each: "evaluate" if each == "eval" else each.replace("-", "_") for each in [*COMMANDS, *OF_OTHERS]}


def test_every_command_has_a_file_and_every_file_of_a_command_is_registered() -> None:
    for command in app.registered_commands:
        assert command.callback.__module__ == f"hf_taskvec.cli.{FILES[command.name]}"
        assert command.callback.__name__ == f"{FILES[command.name]}_command"
    folder = Path(hf_taskvec.cli.__file__).parent
    with_commands = {
        path.stem
        for path in folder.glob("*.py")
        if re.search(r"^def \w+_command\((?:\n|context)", path.read_text(), re.M)
    }
    assert with_commands == set(FILES.values()) and len(app.registered_commands) == len(FILES)


@pytest.mark.parametrize("arguments", [["--help"], *([command, "--help"] for command in FILES)], ids=" ".join)
def test_starting_imports_nothing_heavy(arguments: list[str]) -> None:
    """Neither the help nor the refusal of a wrong command waits for torch."""
    code = (
        "import sys\nfrom hf_taskvec.cli import main\n"
        f"try:\n    main({arguments!r})\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'transformers', 'peft', 'numpy', 'datasets', 'accelerate', 'huggingface_hub', "
        "'matplotlib'}\n"
        "print(sorted({m.split('.')[0] for m in sys.modules} & heavy))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


def test_folders_that_were_seen_before_need_torch_alone(models: TinyModels, tmp_path: Path) -> None:
    """What the first process learned of a config, later ones need no other library for."""
    pair = models.pair("llama")
    base, tuned = str(pair.base), str(pair.tuned)
    commands = [
        ["extract", base, tuned, "-o", "first"],
        ["extract", base, tuned, "-o", "vector"],
        ["show", "vector", "--json"],
        ["combine", "-0.5*v", "v=vector", "-o", "combined"],
        ["apply", "vector", base, "-o", "model"],
    ]
    heavy = "{'transformers', 'peft', 'accelerate', 'datasets', 'matplotlib', 'scipy', 'sympy', 'torch._dynamo'}"
    found = []
    for arguments in commands:
        code = (
            f"import sys\nfrom hf_taskvec.cli import main\ntry:\n    main({arguments!r})\n"
            f"except SystemExit as done:\n    print([done.code, *{heavy} & {{*sys.modules}}])"
        )
        environment = {**os.environ, "HF_ASSETS_CACHE": str(tmp_path / "assets")}
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        found.append(done.stdout.splitlines()[-1])
    assert "transformers" in found[0] and found[1:] == ["[0]"] * 4


# Help


def test_all_commands_are_there(taskvec: Run) -> None:
    answer = taskvec("--help")
    assert answer.code == 0
    assert all(re.search(rf"│ {command} ", answer.out) for command in FILES)
    assert "Exit codes: 0 done, 1 refused or failed, 2 wrong usage, 130 interrupted" in answer.out
    assert len(answer.out.splitlines()) <= 40


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_a_screen(taskvec: Run, command: str) -> None:
    answer = taskvec(command, "--help")
    assert answer.code == 0 and "--json" in answer.out and "--debug" in answer.out
    # A sweep also has the criteria, a box of ten lines, and what else it asks; an audit these and the attacks;
    # forgetting, the training.
    assert len(answer.out.rstrip().splitlines()) <= {"sweep": 52, "audit": 58, "forget": 58}.get(command, 40)
    assert max(map(len, answer.out.splitlines())) <= 100


def test_the_version_is_the_packages(taskvec: Run) -> None:
    from hf_taskvec import __version__

    assert taskvec("--version").out.strip() == f"taskvec {__version__}"


# Errors


@pytest.mark.parametrize("command", COMMANDS)
def test_wrong_usage_ends_with_code_2(taskvec: Run, command: str) -> None:
    assert taskvec(command).code == 2
    assert taskvec(command, "--no-such-option").code == 2


def test_a_wrong_command_gets_a_suggestion(taskvec: Run) -> None:
    answer = taskvec("extrakt")
    assert answer.code == 2 and "Did you mean 'extract'?" in answer.err


def test_debug_shows_the_traceback(taskvec: Run) -> None:
    with pytest.raises(FileNotFoundError):
        main(["show", "nowhere/at/all", "--debug"])


def test_an_error_is_json_for_scripts(taskvec: Run) -> None:
    answer = taskvec("show", "nowhere/at/all", "--json")
    assert answer.code == 1 and "no folder 'all'" in answer.json["error"]


def test_an_error_that_is_not_ours_is_one_sentence_too(taskvec: Run, edited: Edited, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "nothing-known"}')
    answer = taskvec("eval", tmp_path, "--forget", "lamps.txt", "-o", tmp_path / "x")
    assert answer.code == 1
    assert re.match(r"taskvec: \w+Error: .*run it again with --debug", answer.err.strip())


def test_an_interrupted_command_ends_with_code_130(taskvec: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(TaskVector, "norms", stop)
    answer = taskvec("show", "vector")
    assert answer.code == 130 and "interrupted" in answer.err
