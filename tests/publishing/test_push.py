"""Pushing to the Hub, over real HTTP to the loopback server; transformers and PEFT load back what was pushed."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from support import tiny_models
from support.edited_model import Edited
from support.hub_server import OTHER_TOKEN, HubServer
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_taskvec import TaskVector
from hf_taskvec.errors import BadValueError, HubError, LeakError, MismatchError, MissingFileError
from hf_taskvec.evaluation import UnlearningReport, load_book
from hf_taskvec.publishing import push_folder

REPO = "me/forget"


@pytest.fixture(scope="module")
def merged(edited: Edited) -> Path:
    return edited.vector.apply(edited.pair.base, edited.folder / "merged", scale=-0.5)


def state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


# A merged model, and back


def test_a_merged_model_is_pushed_in_one_commit(hub: HubServer, edited: Edited, merged: Path) -> None:
    pushed = push_folder(merged, REPO, report=edited.report)
    assert pushed.changed and pushed.commit == hub.history(REPO)[0].sha
    assert len(hub.history(REPO)) == 2  # the Hub's own first commit, and ours
    files = hub.files(REPO)
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json", "taskvec_apply.json"} <= set(files)
    assert {"report/report.json", "report/report.md", "report/scores.png", "report/pareto.png"} <= set(files)
    for revision in (None, pushed.commit):
        loaded = AutoModelForCausalLM.from_pretrained(REPO, revision=revision)
        assert_same(state(loaded), state(AutoModelForCausalLM.from_pretrained(merged)))
    assert AutoTokenizer.from_pretrained(REPO)("Room 3.") == AutoTokenizer.from_pretrained(merged)("Room 3.")


def test_the_books_texts_stay_here(hub: HubServer, edited: Edited, merged: Path) -> None:
    push_folder(merged, REPO, report=edited.report)
    published = hub.files(REPO)
    passage = edited.report.passages[0]
    assert passage.prompt in edited.report.to_json()
    for name, data in published.items():
        if name != "tokenizer.json":
            assert passage.prompt.encode() not in data and passage.answer.encode() not in data, name
    again = UnlearningReport.load(_written(edited.folder / "again.json", published["report/report.json"]))
    assert again.scores == edited.report.scores and again.passages == ()


def _written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def test_a_report_in_the_folder_is_found(hub: HubServer, edited: Edited, tmp_path: Path) -> None:
    out = edited.vector.apply(edited.pair.base, tmp_path / "out", scale=-1)
    edited.report.save(out / "report")
    (out / "report" / "store").mkdir()
    (out / "report" / "store" / "texts.json").write_text("{}")
    push_folder(out, REPO)
    assert b"stands at **\xce\xbb = \xe2\x88\x921**" in hub.files(REPO)["README.md"]
    assert not [name for name in hub.files(REPO) if "store" in name or "samples" in name]


def test_a_report_of_another_edit_is_refused(hub: HubServer, edited: Edited, tmp_path: Path) -> None:
    other = (2 * edited.vector).apply(edited.pair.base, tmp_path / "other", scale=-0.5)
    with pytest.raises(MismatchError, match="report is of another edit"):
        push_folder(other, REPO, report=edited.report)
    assert hub.count("POST") == 0


def test_bases_and_books_are_read_from_the_hub_by_revision(hub: HubServer, edited: Edited, tmp_path: Path) -> None:
    first = hub.add_repo("me/base", edited.pair.base)
    hub.add_repo("me/base", edited.pair.tuned)  # main moves on
    vector = TaskVector.from_finetuned(f"me/base@{first}", "me/base")
    out = vector.apply(f"me/base@{first}", tmp_path / "out")
    assert_same(tensors_of(out), tensors_of(edited.pair.tuned))
    old = hub.add_repo("me/book", {"train.txt": edited.lamps.read_bytes()}, repo_type="dataset")
    hub.add_repo("me/book", {"train.txt": edited.boats.read_bytes()}, repo_type="dataset")
    assert "lamps" in load_book(f"me/book@{old}").text
    assert "boats" in load_book("me/book").text


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: source.read() for name, source in tiny_models.tensors(folder).items()}


# One commit, or none


def test_unchanged_content_makes_no_commit(hub: HubServer, edited: Edited, merged: Path) -> None:
    first = push_folder(merged, REPO, report=edited.report)
    again = push_folder(merged, REPO, report=edited.report)
    assert not again.changed and again.commit == first.commit
    assert (hub.count("/commit/"), len(hub.history(REPO))) == (1, 2)


def test_stale_weights_go_in_the_same_commit(hub: HubServer, edited: Edited, merged: Path, tmp_path: Path) -> None:
    sharded = edited.vector.apply(edited.pair.base, tmp_path / "sharded", scale=-0.5, max_shard_size="60KB")
    push_folder(sharded, REPO)
    assert "model.safetensors.index.json" in hub.files(REPO)
    hub.add_repo(REPO, {**hub.files(REPO), "notes.md": b"mine"})
    before = len(hub.history(REPO))
    push_folder(merged, REPO)
    files = set(hub.files(REPO))
    assert len(hub.history(REPO)) == before + 1
    assert [name for name in files if "safetensors" in name] == ["model.safetensors"]
    assert "notes.md" in files  # only weights of the same kind are ours to remove
    assert_same(state(AutoModelForCausalLM.from_pretrained(REPO)), state(AutoModelForCausalLM.from_pretrained(merged)))


def test_a_push_to_a_branch_or_a_pull_request_leaves_main_alone(hub: HubServer, merged: Path) -> None:
    push_folder(merged, REPO, revision="forget-v1")
    assert set(hub.files(REPO)) == {".gitattributes"}
    assert "model.safetensors" in hub.files(REPO, "forget-v1")
    pull = push_folder(merged, REPO, create_pr=True, commit_message="Forget", commit_description="Because.")
    assert pull.pull_request is not None and pull.pull_request.endswith("/discussions/1")
    assert set(hub.files(REPO)) == {".gitattributes"}
    newest = hub.history(REPO, "refs/pr/1")[0]
    assert (newest.title, newest.message) == ("Forget", "Because.")


def test_a_failed_commit_leaves_nothing_and_the_next_push_resumes(hub: HubServer, merged: Path) -> None:
    hub.fail_next("/commit/", status=503)
    with pytest.raises(HubError, match="503"):
        push_folder(merged, REPO)
    assert set(hub.files(REPO)) == {".gitattributes"}
    uploads = hub.count(f"PUT {hub.cdn_url}")
    push_folder(merged, REPO)
    assert hub.count(f"PUT {hub.cdn_url}") == uploads == 1  # the weights of the first try were kept
    assert "model.safetensors" in hub.files(REPO)


def test_a_dropped_upload_is_sent_again(hub: HubServer, merged: Path) -> None:
    hub.drop_next_upload(after_bytes=1000)
    push_folder(merged, REPO)
    assert hub.files(REPO)["model.safetensors"] == (merged / "model.safetensors").read_bytes()


def test_a_request_that_fails_with_500_is_tried_again(hub: HubServer, merged: Path) -> None:
    hub.fail_next("/preupload/")
    push_folder(merged, REPO)
    assert [request.status for request in hub.log if "/preupload/" in request.line] == [500, 200]


# Refusals


@pytest.mark.parametrize(("token", "status"), [("hf_wrong", 401), (OTHER_TOKEN, 403)])
def test_without_the_right_to_push_the_error_is_one_line_without_the_token(
    hub: HubServer, merged: Path, token: str, status: int
) -> None:
    with pytest.raises(HubError, match=f"{status}") as error:
        push_folder(merged, REPO, token=token)
    assert token not in str(error.value) and "\n" not in str(error.value)


def test_a_commit_of_somebody_else_in_between_is_not_overwritten(hub: HubServer, merged: Path) -> None:
    hub.fail_next("/commit/", status=412)
    with pytest.raises(HubError, match="push again"):
        push_folder(merged, REPO)


def test_private_is_never_pushed_to_a_public_repository(hub: HubServer, merged: Path) -> None:
    hub.add_repo(REPO, {"a": b"1"})
    with pytest.raises(HubError, match="is public"):
        push_folder(merged, REPO, private=True)
    assert hub.files(REPO) == {"a": b"1"}


def test_a_hub_that_cannot_be_reached_is_one_error_of_ours(edited: Edited, merged: Path) -> None:
    code = f"from hf_taskvec.publishing.push import push_folder; push_folder({str(merged)!r}, {REPO!r})"
    environment = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert "HubError: the Hub could not be reached" in done.stderr.splitlines()[-1]


def test_a_bad_name_or_folder_is_refused_before_anything_is_sent(
    hub: HubServer, edited: Edited, merged: Path, tmp_path: Path
) -> None:
    with pytest.raises(BadValueError, match="not a name for a Hub repository"):
        push_folder(merged, "me/a/b")
    with pytest.raises(MissingFileError, match=r"taskvec_apply\.json"):
        push_folder(edited.pair.base, REPO)
    with pytest.raises(MissingFileError, match="no folder 'nowhere'"):
        push_folder(tmp_path / "nowhere", REPO)
    assert hub.count("POST") == 0


def test_a_reference_to_local_folders_is_refused(hub: HubServer, edited: Edited, tmp_path: Path) -> None:
    edited.pair.vector().save(tmp_path / "reference", reference=True)
    with pytest.raises(LeakError, match="reference to folders of this machine"):
        push_folder(tmp_path / "reference", REPO)
    assert hub.count("POST") == 0


def test_a_reference_to_the_hub_is_pushed(hub: HubServer, edited: Edited, tmp_path: Path) -> None:
    hub.add_repo("me/base", edited.pair.base)
    hub.add_repo("me/tuned", edited.pair.tuned)
    TaskVector.from_finetuned("me/base", "me/tuned").save(tmp_path / "reference", reference=True)
    push_folder(tmp_path / "reference", "me/reference")
    assert set(hub.files("me/reference")) == {".gitattributes", "README.md", "taskvec.json"}
    tiny_models.assert_gives_tuned(TaskVector.load("me/reference"), edited.pair)


def test_paths_in_configs_stay_here(hub: HubServer, edited: Edited, merged: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    AutoModelForCausalLM.from_pretrained(edited.pair.base).save_pretrained(base)
    AutoTokenizer.from_pretrained(edited.pair.base).save_pretrained(base)
    config = json.loads((base / "config.json").read_text()) | {"_name_or_path": str(base)}
    (base / "config.json").write_text(json.dumps(config))
    out = edited.vector.apply(base, tmp_path / "out", scale=-0.5)
    push_folder(out, REPO)
    assert "_name_or_path" not in json.loads(hub.files(REPO)["config.json"])
    for name, data in hub.files(REPO).items():
        assert str(tmp_path).encode() not in data, name
    assert AutoModelForCausalLM.from_pretrained(REPO) is not None


def test_a_secret_in_a_file_stops_the_push(hub: HubServer, edited: Edited, tmp_path: Path) -> None:
    out = edited.vector.apply(edited.pair.base, tmp_path / "out")
    (out / "recipe.yaml").write_text("token: hf_" + "x" * 30)
    with pytest.raises(LeakError, match=r"recipe\.yaml holds a token"):
        push_folder(out, REPO, include=["recipe.yaml"])
    (out / "recipe.yaml").write_text(f"token: {os.environ['HF_TOKEN']}")
    with pytest.raises(LeakError, match=r"recipe\.yaml holds a token"):
        push_folder(out, REPO, include=["*.yaml"])
    (out / "recipe.yaml").write_text("scale: -0.6")
    push_folder(out, REPO, include=["recipe.yaml"])
    assert hub.files(REPO)["recipe.yaml"] == b"scale: -0.6"


# Made up here, so that no scanner of this repository finds a token in it.
SECRETS = {
    "private key": "-----BEGIN " + "OPENSSH PRIVATE KEY-----\nabc\n",
    "encrypted key": "-----BEGIN " + "ENCRYPTED PRIVATE KEY-----\nabc\n",
    "Slack": "xoxb-" + "123456789012-123456789012-" + "a1B2" * 6,
    "Google": "AIza" + "Sy0" * 11 + "ab",
    "GitLab": "glpat-" + "a1B2" * 5,
    "npm": "//registry.npmjs.org/:_authToken=npm_" + "a1B2" * 9,
    "Weights & Biases": "WANDB_API_KEY=" + "0123456789" * 4,
    "a database": "DATABASE_URL=postgres://me:" + "hunter2hunter2@db.example/x",
    "Stripe": "sk_live_" + "a1B2" * 6,
    "AWS": "aws_secret_access_key = '" + "a1B2+" * 8 + "'",
    "a service account": json.dumps(
        {"type": "service_account", "private_key_id": "x", "client_secret": "a1B2c3D4" * 3}
    ),
}


@pytest.mark.parametrize("kind", SECRETS)
def test_every_kind_of_secret_stops_the_push(hub: HubServer, merged: Path, tmp_path: Path, kind: str) -> None:
    """In a config, in a vocabulary, in a binary file, in UTF-16, and behind megabytes of something else."""
    secret = SECRETS[kind]
    for number, (name, content) in enumerate(
        {
            "chat_template.jinja": secret.encode(),
            "tokenizer.model": b"\x00\xff\x00" * 100 + b"\n" + secret.encode() + b"\n\x00\xff",
            "LICENSE": b"words and words\n" * 400_000 + secret.encode(),
            "NOTICE": secret.encode("utf-16"),
            "keys": secret.encode(),
        }.items()
    ):
        out = Path(shutil.copytree(merged, tmp_path / str(number)))
        (out / name).write_bytes(content)
        with pytest.raises(LeakError, match=f"{name} holds a token") as error:
            push_folder(out, REPO, include=["keys"] if name == "keys" else [])
        assert secret.strip()[-12:] not in str(error.value)
    assert hub.count("POST") == 0


def test_what_is_no_part_of_the_model_is_left_out_and_named(hub: HubServer, merged: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(merged, tmp_path / "out"))
    (out / "notes.txt").write_text("mine")
    (out / "id_rsa").write_text(SECRETS["private key"])
    (out / "deep").mkdir()
    (out / "deep" / "credentials.json").write_text(SECRETS["a service account"])
    with pytest.warns(UserWarning, match=r"left out.*deep/credentials\.json, id_rsa, notes\.txt"):
        pushed = push_folder(out, REPO)
    assert pushed.left_out == ("deep/credentials.json", "id_rsa", "notes.txt")
    assert not {"notes.txt", "id_rsa", "deep/credentials.json"} & set(hub.files(REPO))
    with pytest.warns(UserWarning, match="left out"):
        push_folder(out, REPO, include=["notes.txt"])
    assert hub.files(REPO)["notes.txt"] == b"mine"
    with pytest.raises(MissingFileError, match=r"no file that include='other\.txt' names"):
        push_folder(out, REPO, include=["other.txt"])


@pytest.mark.parametrize("name", ["chat_template.jinja", "additional_chat_templates/x.jinja", "README.md"])
def test_no_link_is_followed(hub: HubServer, merged: Path, tmp_path: Path, name: str) -> None:
    private = tmp_path / "private"
    private.mkdir()
    (private / "x.jinja").write_text("mine alone")
    out = Path(shutil.copytree(merged, tmp_path / "out"))
    if "/" in name:
        (out / "additional_chat_templates").symlink_to(private)
        with pytest.warns(UserWarning, match="left out of the push.*additional_chat_templates"):
            push_folder(out, REPO)
        assert not [file for file in hub.files(REPO) if "jinja" in file]
        return
    (out / name).symlink_to(private / "x.jinja")
    with pytest.raises(LeakError, match=f"{name} in out is a link"):
        push_folder(out, REPO)
    assert hub.count("POST") == 0


# Progress


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("shown", [True, False])
def test_a_progress_bar_is_shown_as_asked_and_the_setting_is_left_as_it_was(
    hub: HubServer, merged: Path, capfd: pytest.CaptureFixture[str], shown: bool, before: bool
) -> None:
    """As asked, whatever others have switched on or off; and left as it was."""
    was_off = are_progress_bars_disabled()
    enable_progress_bars() if before else disable_progress_bars()
    try:
        push_folder(merged, REPO, progress=shown)
        assert are_progress_bars_disabled() is not before
    finally:
        disable_progress_bars() if was_off else enable_progress_bars()
    assert ("model.safetensors: 100%" in capfd.readouterr().err) is shown
