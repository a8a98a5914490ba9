"""Model cards: true, complete, valid, and without a trace of the machine that they were made on."""

import getpass
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from support import tiny_models
from support.edited_model import Edited
from support.hub_server import HubServer

from hf_taskvec import TaskVector
from hf_taskvec.errors import (
    BadValueError,
    CorruptFileError,
    HubError,
    LeakError,
    MismatchError,
    MissingFileError,
    OutputError,
)
from hf_taskvec.publishing.model_card import card_for, write_card
from hf_taskvec.publishing.privacy import check_text
from hf_taskvec.publishing.push import push_folder
from hf_taskvec.publishing.written_folder import open_artifact

SECRET = "hf_" + "SeCrEt" * 6


@pytest.fixture
def merged(edited: Edited, tmp_path: Path) -> Path:
    return edited.vector.apply(edited.pair.base, tmp_path / "merged", scale=-0.5)


def metadata(card: str) -> dict[str, Any]:
    return yaml.safe_load(re.match(r"---\n(.*?)\n---\n", card, re.DOTALL)[1])


def on_the_hub(hub: HubServer, edited: Edited) -> tuple[str, str]:
    """The commits of `me/base` and `me/tuned`."""
    return hub.add_repo("me/base", edited.pair.base), hub.add_repo("me/tuned", edited.pair.tuned)


# What a card says


def test_a_merged_models_metadata_names_its_sources_and_licence(hub: HubServer, edited: Edited, tmp_path: Path) -> None:
    on_the_hub(hub, edited)
    vector = TaskVector.from_finetuned("me/base", "me/tuned", name="hp1")
    out = vector.apply("me/base", tmp_path / "out", scale=-0.5)
    data = metadata(card_for(open_artifact(out), repo_id="me/forgot"))
    assert data["base_model"] == ["me/base", "me/tuned"]
    assert data["base_model_relation"] == "merge"
    assert (data["library_name"], data["pipeline_tag"]) == ("transformers", "text-generation")
    assert data["license"] == "mit"  # of me/base
    assert data["datasets"] == ["me/stories"]
    assert {"task-vector", "merge"} <= set(data["tags"])
    assert "model-index" not in data and "metrics" not in data  # nothing was measured


def test_the_reports_numbers_are_the_cards(hub: HubServer, edited: Edited, merged: Path) -> None:
    card = card_for(open_artifact(merged), repo_id="me/forgot", report=edited.report)
    data = metadata(card)
    assert data["metrics"] == ["rouge", "perplexity"]
    assert "unlearning" in data["tags"]
    results = ModelCard(card).data.eval_results
    found = {(r.dataset_config, r.dataset_type, r.dataset_split, r.metric_type): r.metric_value for r in results}
    for book, role in (("lamps", "forget"), ("boats", "retain")):
        for split in ("seen", "held_out"):
            for name, metric in (("rouge", "rouge_l"), ("perplexity", "perplexity")):
                score = edited.report.score(book, -0.5, metric, split)
                assert found.pop((role, book, split, name)) == pytest.approx(score.value.value, abs=1e-6)
    assert found == {}
    from hf_taskvec.evaluation.reporting.tables import score_table

    assert score_table(edited.report, "rouge_l", "seen") in card
    assert "![Scores against λ, with intervals](report/scores.png)" in card
    assert "the edit is meant to make a model forget lamps, while it keeps boats" in card


def test_a_scale_that_was_not_measured_has_no_numbers(edited: Edited, tmp_path: Path) -> None:
    out = edited.vector.apply(edited.pair.base, tmp_path / "out", scale=-0.7)
    card = card_for(open_artifact(out), report=edited.report)
    assert "model-index" not in metadata(card)
    assert "which the sweep did **not** measure" in card


def test_a_card_names_the_edit_of_several_that_it_holds(edited: Edited, tmp_path: Path) -> None:
    report, half = edited.report_of_edits, -0.5 * edited.vector
    out = half.apply(edited.pair.base, tmp_path / "out")
    card = card_for(open_artifact(out), report=report)
    assert "holds the edit **half of it**" in card and "| all of it |" in card
    found = {r.dataset_split: r.metric_value for r in ModelCard(card).data.eval_results if r.metric_type == "rouge"}
    assert found["seen"] == pytest.approx(report.score("boats", "half of it").value.value, abs=1e-6)
    other = half.apply(edited.pair.base, tmp_path / "other", scale=0.5)
    assert "at another scale, or none" in card_for(open_artifact(other), report=report)
    stranger = edited.vector.filter(include="*proj*").apply(edited.pair.base, tmp_path / "stranger")
    with pytest.raises(MismatchError, match="another edit"):
        write_card(stranger, report=report)


def test_without_a_report_the_card_says_that_nothing_was_measured(merged: Path) -> None:
    assert "This edit has not been evaluated" in card_for(open_artifact(merged))


def test_models_adapters_and_vectors_each_have_their_card(hub: HubServer, edited: Edited, tmp_path: Path) -> None:
    on_the_hub(hub, edited)
    vector = TaskVector.from_finetuned("me/base", "me/tuned", name="hp1").filter(include="*proj*").compress(rank=2)
    vector.save(tmp_path / "vector")
    vector.to_adapter(tmp_path / "adapter", scale=-1)
    vector.apply("me/base", tmp_path / "model", scale=-1)
    for name, library, relation in (
        ("vector", "hf_taskvec", "adapter"),
        ("adapter", "peft", "adapter"),
        ("model", "transformers", "merge"),
    ):
        card = card_for(open_artifact(tmp_path / name), repo_id=f"me/{name}")
        data = metadata(card)
        assert (data["library_name"], data["base_model_relation"]) == (library, relation)
        for heading in ("Use", "Evaluation", "How to undo the edit", "Limits and intended use", "Licence", "Versions"):
            assert f"\n## {heading}\n" in card
        assert "no proof of erasure" in card
        ModelCard(card).validate()  # the Hub's own check
    assert metadata(card_for(open_artifact(tmp_path / "adapter")))["base_model"] == "me/base"


def test_the_code_on_the_card_makes_the_model_again(
    hub: HubServer, edited: Edited, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base_commit, tuned_commit = on_the_hub(hub, edited)
    hp1 = TaskVector.from_finetuned("me/base", "me/tuned", name="hp1")
    forget = (
        -0.6 * hp1 + 0.5 * hp1.filter(include="*mlp*").compress(rank=3).named("small") + 0.1 * hp1.scale({"*": 2.0})
    )
    out = forget.apply("me/base", tmp_path / "out", scale=0.5)
    card = card_for(open_artifact(out), repo_id="me/forgot")
    assert base_commit in card and tuned_commit in card and "bit for bit" in card
    code = re.search(r"```python\n(from hf_taskvec.*?)```", card, re.DOTALL)[1]
    hub.add_repo("me/base", edited.pair.tuned)  # main moves on; the card names the commit
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    for name, source in tiny_models.tensors(out).items():
        assert torch.equal(tiny_models.tensors(tmp_path / "model")[name].read(), source.read()), name


def test_the_options_that_made_it_are_in_the_code(edited: Edited, tmp_path: Path) -> None:
    out = edited.vector.apply(edited.pair.base, tmp_path / "out", dtype="bfloat16")
    assert 'output="model", dtype="bfloat16")' in card_for(open_artifact(out))
    small = edited.vector.compress(rank=2)
    small.to_adapter(tmp_path / "adapter", base=edited.pair.base, dense="drop")
    assert 'vector.to_adapter("adapter", dense="drop", base="./base")' in card_for(open_artifact(tmp_path / "adapter"))


def test_the_card_shows_the_edit_as_a_formula(edited: Edited, merged: Path) -> None:
    card = card_for(open_artifact(merged))
    assert r"$$\theta = \theta_0 - 0.5 \cdot \tau_{\text{tuned}}$$" in card


def test_fingerprints_of_local_folders_are_shown(edited: Edited, merged: Path) -> None:
    record = json.loads((merged / "taskvec_apply.json").read_text())
    card = card_for(open_artifact(merged))
    assert f"**base** `[{record['base']['fingerprint'][:12]}]`" in card
    assert "Models without a link were folders on the author's machine" in card


# The licence


def test_no_licence_is_invented(edited: Edited, tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    for path in edited.pair.base.iterdir():
        if path.name != "README.md":
            (base / path.name).write_bytes(path.read_bytes())
    card = card_for(open_artifact(edited.vector.apply(base, tmp_path / "out")))
    assert "license" not in metadata(card)
    assert "no card of **base**" in card and "no licence is granted here" in card


def test_a_licence_keeps_its_name_and_its_link(hub: HubServer, edited: Edited, tmp_path: Path) -> None:
    readme = b"---\nlicense: other\nlicense_name: special\nlicense_link: LICENSE\n---\n"
    files = {path.name: path.read_bytes() for path in edited.pair.base.iterdir()}
    sha = hub.add_repo("me/base", {**files, "README.md": readme, "LICENSE": b"Be kind."})
    out = edited.vector.apply("me/base", tmp_path / "out")
    assert (out / "LICENSE").read_text() == "Be kind."
    data = metadata(card_for(open_artifact(out)))
    assert (data["license"], data["license_name"]) == ("other", "special")
    assert data["license_link"] == f"https://huggingface.co/me/base/blob/{sha}/LICENSE"


def test_licences_of_other_sources_are_named(hub: HubServer, edited: Edited, tmp_path: Path) -> None:
    on_the_hub(hub, edited)
    tuned = {path.name: path.read_bytes() for path in edited.pair.tuned.iterdir()}
    hub.add_repo("me/tuned", {**tuned, "README.md": b"---\nlicense: gpl-3.0\n---\n"})
    out = TaskVector.from_finetuned("me/base", "me/tuned").apply("me/base", tmp_path / "out")
    card = card_for(open_artifact(out))
    assert metadata(card)["license"] == "mit"
    assert re.search(r"Its other sources state licences of their own.*me/tuned.*gpl-3\.0", card)


def test_a_local_base_can_be_given_its_hub_id(edited: Edited, merged: Path) -> None:
    data = metadata(card_for(open_artifact(merged), base_model="microsoft/phi-1_5", datasets=("me/books",)))
    assert data["base_model"] == "microsoft/phi-1_5"
    assert data["datasets"] == ["me/books", "me/stories"]
    with pytest.raises(BadValueError, match="not a Hub id"):
        card_for(open_artifact(merged), base_model="../phi")


# Nothing of the machine


@pytest.fixture
def person(monkeypatch: pytest.MonkeyPatch) -> str:
    """This machine's user is somebody with a name that no test data has."""
    monkeypatch.setenv("LOGNAME", "zaphod")
    monkeypatch.setenv("HF_TOKEN", SECRET)
    monkeypatch.setenv("WANDB_API_KEY", "wandb-key-123456")
    assert getpass.getuser() == "zaphod"
    return "zaphod"


def clean(card: str, tmp_path: Path) -> bool:
    planted = ("zaphod", SECRET, "wandb-key-123456", str(tmp_path), str(Path.home()) + "/")
    return not any(each in card for each in planted)


def test_paths_of_all_inputs_stay_away(edited: Edited, person: str, tmp_path: Path) -> None:
    """Base, fine-tune and output lie below a folder of the user's name; their names alone are on the card."""
    home = tmp_path / "home" / person
    pair = tiny_models.save_pair(home, tiny_models.make("llama"), tiny_models.tuned_copy(tiny_models.make("llama")))
    vector = TaskVector.from_finetuned(pair.base, pair.tuned)
    vector.save(home / "vector")
    vector.apply(pair.base, home / "model", scale=-1)
    vector.filter(include="*proj*").compress(rank=1).to_adapter(home / "adapter", str(pair.base))
    for name in ("vector", "model", "adapter"):
        card = write_card(home / name, datasets=("me/books",)).read_text()
        assert clean(card, tmp_path), name


@pytest.mark.parametrize(
    "planted",
    [
        {"purpose": "made in /home/someone/models"},
        {"purpose": r"made in C:\Users\someone"},
        {"purpose": "made in ~/models"},
        {"purpose": f"with the token {SECRET}"},
        {"purpose": "with hf_" + "a1B2" * 8},
        {"purpose": "with wandb-key-123456"},
        {"purpose": "made by Zaphod himself"},
        {"datasets": ("/home/someone/books",)},
        {"datasets": ("zaphod-books",)},
        {"base_model": "/home/someone/base"},
    ],
)
def test_what_is_planted_in_an_option_is_refused(merged: Path, person: str, planted: dict[str, Any]) -> None:
    with pytest.raises((LeakError, BadValueError)) as error:
        write_card(merged, **planted)
    assert SECRET not in str(error.value) and "wandb-key" not in str(error.value)
    assert not (merged / "README.md").exists()


def test_what_is_planted_in_names_is_refused(edited: Edited, person: str, tmp_path: Path) -> None:
    pair = edited.pair
    by_label = TaskVector.from_finetuned(pair.base, pair.tuned, name="zaphod_v1")
    out = by_label.apply(pair.base, tmp_path / "label")
    with pytest.raises(LeakError, match="user name"):
        card_for(open_artifact(out))
    (tmp_path / "zaphod-base").symlink_to(pair.base)
    (tmp_path / "zaphod-tuned").symlink_to(pair.tuned)
    named = {"name": "v"}
    for vector, base in (
        (TaskVector.from_finetuned(pair.base, pair.tuned, **named), tmp_path / "zaphod-base"),
        (TaskVector.from_finetuned(pair.base, tmp_path / "zaphod-tuned", **named), pair.base),
    ):
        # A link is followed to the real folder, whose name it is; a copy has the name itself.
        assert clean(card_for(open_artifact(vector.apply(base, tmp_path / f"o{id(vector)}"))), tmp_path)


def test_what_is_planted_in_a_report_is_refused(edited: Edited, merged: Path, person: str) -> None:
    from dataclasses import replace

    report = edited.report
    for name in ("Zaphod's diary", "/home/someone/book", SECRET):
        books = (replace(report.books[0], name=name), *report.books[1:])
        scores = tuple(replace(s, book=name) if s.book == "lamps" else s for s in report.scores)
        with pytest.raises(LeakError):
            card_for(open_artifact(merged), report=replace(report, books=books, scores=scores))


def test_what_is_planted_in_a_record_is_refused(merged: Path, person: str) -> None:
    record = json.loads((merged / "taskvec_apply.json").read_text())
    for name in ("/home/someone/base", "base of zaphod", SECRET):
        record["base"]["name"] = name
        (merged / "taskvec_apply.json").write_text(json.dumps(record))
        with pytest.raises(LeakError):
            card_for(open_artifact(merged))


def test_a_command_with_a_path_is_left_out(merged: Path, person: str) -> None:
    for arguments, shown in (
        (["apply", "v", "base", "-o", "out"], True),
        (["apply", "/home/someone/v", "base", "-o", "out"], False),
        (["apply", "v", "base", "--token", SECRET], False),
    ):
        stored = {"commands": [["taskvec", *arguments]]}
        (merged / "taskvec-command.json").write_text(json.dumps(stored))
        card = card_for(open_artifact(merged))
        assert ("taskvec apply v base" in card) is shown
        assert SECRET not in card and "/home/someone" not in card


def test_the_namespace_of_a_hub_id_may_be_the_users_name(hub: HubServer, merged: Path, person: str) -> None:
    card = card_for(open_artifact(merged), repo_id="zaphod/forgot", base_model="zaphod/base")
    assert "zaphod/forgot" in card


def test_what_only_looks_like_a_path_is_fine(merged: Path) -> None:
    address = f"https://huggingface.co{Path.home()}-and-more/tree/main"  # a namespace that begins like the home folder
    purpose = f"see {address}, and/or 1/2/3, λ/2, and `report/scores.png`"
    check_text(purpose, "the purpose")
    assert "`report/scores.png`" in card_for(open_artifact(merged), purpose=purpose.replace(address, "it"))


# Checks before a push


def test_a_changed_card_is_kept_and_checked(hub: HubServer, merged: Path) -> None:
    path = write_card(merged, repo_id="me/forgot")
    path.write_text(path.read_text() + "\nA line of mine.\n")
    with pytest.raises(OutputError, match="already"):
        write_card(merged)
    push_folder(merged, "me/forgot")
    assert hub.files("me/forgot")["README.md"].decode().endswith("A line of mine.\n")
    for wrong, problem in (
        ("library_name: transformers", "library_name: timm"),
        ("pipeline_tag: text-generation", "pipeline_tag: image-classification"),
        ("license: mit", "license: 'The MIT License, of course'"),
        ("license: mit", "license: mit\nbase_model: ../base"),
        ("license: mit", "license: mit\nbase_model: me/base\nbase_model_relation: finetune"),
        ("- task-vector", "- something"),
        ("license: mit", "license: mit\nmodel-index:\n- name: x\n  results:\n  - task: {type: a}"),
    ):
        path.write_text(write_card(merged, overwrite=True).read_text().replace(wrong, problem))
        with pytest.raises(BadValueError, match=r"metadata|model-index"):
            push_folder(merged, "me/forgot")
    path.write_text("# No metadata\n")
    with pytest.raises(CorruptFileError, match="no readable metadata"):
        push_folder(merged, "me/forgot")
    path.write_text(write_card(merged, overwrite=True).read_text() + "See /home/someone/notes.txt")
    with pytest.raises(LeakError, match=r"ends with 'notes\.txt'"):
        push_folder(merged, "me/forgot")
    assert len(hub.history("me/forgot")) == 2


def test_the_hubs_check_stops_a_push(hub: HubServer, merged: Path) -> None:
    hub.fail_next("/validate-yaml", status=400)
    with pytest.raises(HubError, match=r"card|400"):
        push_folder(merged, "me/forgot")
    assert set(hub.files("me/forgot")) == {".gitattributes"}


def test_a_card_needs_no_network(edited: Edited, merged: Path) -> None:
    code = f"from hf_taskvec.publishing.model_card import write_card; write_card({str(merged)!r}, repo_id='me/x')"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_ENDPOINT": "http://127.0.0.1:9"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    assert "license: mit" in (merged / "README.md").read_text()


def test_what_is_no_output_of_ours_gets_no_card(edited: Edited, merged: Path, tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match=r"taskvec\.json"):
        write_card(edited.pair.base)
    (merged / "taskvec_apply.json").write_text("{}")
    with pytest.raises(CorruptFileError, match="damaged"):
        write_card(merged)


def test_the_templates_are_in_the_wheel(installed: Path, merged: Path) -> None:
    assert {path.name for path in (installed / "hf_taskvec" / "model_cards").iterdir()} == {
        "adapter.md",
        "merged_model.md",
        "parts.md",
        "task_vector.md",
    }
    code = (
        "import hf_taskvec, sys; from hf_taskvec.publishing.model_card import write_card\n"
        f"assert hf_taskvec.__file__.startswith({str(installed)!r})\n"
        f"write_card({str(merged)!r}, repo_id='me/forgot')"
    )
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, cwd=merged)
    assert (merged / "README.md").read_text() == card_for(open_artifact(merged), repo_id="me/forgot")
