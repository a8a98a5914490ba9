"""`taskvec apply --push`: from Hub to Hub, in one command."""

from support.command_line import Run
from support.edited_model import Edited
from support.hub_server import HubServer


def test_a_merge_goes_from_hub_to_hub(hub: HubServer, taskvec: Run, edited: Edited) -> None:
    hub.add_repo("me/base", edited.pair.base)
    hub.add_repo("me/tuned", edited.pair.tuned)
    answer = taskvec("apply", "me/tuned", "me/base", "--base", "me/base", "--scale", "-0.5", "--push", "me/x", "--json")
    assert answer.code == 0, answer.err
    assert answer.json["changed"] and answer.json["scale"] == -0.5
    written = edited.vector.apply(edited.pair.base, edited.folder / "beside", scale=-0.5)
    assert hub.files("me/x")["model.safetensors"] == (written / "model.safetensors").read_bytes()
    assert not any(path.suffix == ".safetensors" for path in hub.home.rglob("*"))


def test_where_to_is_said_once(taskvec: Run) -> None:
    for more in ([], ["--push", "me/x", "-o", "out"]):
        answer = taskvec("apply", "vector", "base", *more)
        assert answer.code and "either --output FOLDER or --push REPO_ID" in answer.err


def test_a_dry_run_of_a_push_tells_disk_and_time(taskvec: Run) -> None:
    told = taskvec("apply", "vector", "base", "--push", "me/x", "--dry-run").out
    assert "disk: one shard at a time" in told and "minutes at 50 MB a second" in told
