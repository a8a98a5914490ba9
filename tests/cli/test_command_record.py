"""The command stored beside its output: to be run again, without tokens."""

import json
from pathlib import Path

import pytest
from support.command_line import SECRET, Run
from support.edited_model import Edited
from support.hub_server import HubServer


def test_the_command_beside_the_output_can_be_run_again(taskvec: Run, edited: Edited, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert taskvec("apply", "vector", "base", "--scale", -0.5, "-o", out).code == 0
    first = (out / "model.safetensors").read_bytes()
    commands = json.loads((out / "taskvec-command.json").read_text())["commands"]
    assert commands == [["taskvec", "apply", "vector", "base", "--scale", "-0.5", "-o", str(out)]]
    assert taskvec(*commands[0][1:], "--overwrite").code == 0
    assert (out / "model.safetensors").read_bytes() == first


@pytest.mark.parametrize("option", [["--token", SECRET], [f"--token={SECRET}"]])
def test_no_token_is_stored_or_printed(taskvec: Run, edited: Edited, tmp_path: Path, option: list[str]) -> None:
    answer = taskvec("extract", "base", "tuned", "-o", tmp_path / "out", *option)
    stored = (tmp_path / "out" / "taskvec-command.json").read_text()
    assert SECRET not in stored + answer.out + answer.err and "--token" not in stored
    failed = taskvec("show", f"me/{SECRET}", *option, "--json")
    assert failed.code == 1 and SECRET not in failed.out + failed.err


def test_no_token_of_the_environment_is_stored_or_printed(
    taskvec: Run, edited: Edited, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "abcdef-token")
    out = tmp_path / "abcdef-token"
    answer = taskvec("extract", "base", "tuned", "-o", out, "--name", "v")
    assert answer.code == 0
    assert "abcdef-token" not in (out / "taskvec-command.json").read_text()


def test_a_pushed_command_names_no_place_of_this_machine(
    hub: HubServer, taskvec: Run, edited: Edited, tmp_path: Path
) -> None:
    assert taskvec("apply", "vector", "base", "-o", tmp_path / "out").code == 0
    assert taskvec("push", tmp_path / "out", "me/x").code == 0
    assert "taskvec-command.json" not in hub.files("me/x")  # it has an absolute path
    for name, data in hub.files("me/x").items():
        assert str(tmp_path).encode() not in data, name


@pytest.mark.parametrize("option", [["--token", "my-own-token"], ["--token=my-own-token"]])
def test_a_token_of_any_look_is_in_no_error(taskvec: Run, option: list[str]) -> None:
    failed = taskvec("show", "nowhere/at/my-own-token", *option, "--json")
    assert failed.code == 1 and "no folder '***'" in failed.err
    assert "my-own-token" not in failed.out + failed.err
