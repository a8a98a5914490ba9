"""The library's warnings on the command line."""

import json
import shutil
import warnings

from support.command_line import Run
from support.edited_model import Edited

from hf_taskvec.models.checkpoint import open_checkpoint


def test_swapped_models_give_a_line_and_the_vector(taskvec: Run, edited: Edited) -> None:
    made = shutil.copytree(edited.folder / "tuned", edited.folder / "made")
    record = {"base": {"fingerprint": open_checkpoint(edited.folder / "base").sampled_fingerprint}}
    (made / "training.json").write_text(json.dumps(record))
    with warnings.catch_warnings():
        warnings.simplefilter("default")  # as outside of the tests
        answer = taskvec("extract", "made", "base", "-o", "swapped")
    assert answer.code == 0 and (edited.folder / "swapped" / "taskvec.json").exists()
    line = next(each for each in answer.err.splitlines() if "warning" in each)
    assert line.startswith("taskvec: warning: made, given as the base, was made from base") and ".py" not in line
    assert "τ = tuned − base" in taskvec("extract", "--help").out
