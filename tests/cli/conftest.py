"""What the tests of commands share."""

import pytest
from support.command_line import Answer, Run
from support.edited_model import Edited

from hf_taskvec.cli import main


@pytest.fixture
def taskvec(edited: Edited, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command in the folder of the test data."""
    monkeypatch.chdir(edited.folder)
    monkeypatch.setenv("COLUMNS", "100")
    edited.saved  # noqa: B018 (the folder `vector`)

    def run(*arguments: object) -> Answer:
        capsys.readouterr()
        with pytest.raises(SystemExit) as done:
            main([str(each) for each in arguments])
        out, err = capsys.readouterr()
        return Answer(int(done.value.code or 0), out, err)

    return run
