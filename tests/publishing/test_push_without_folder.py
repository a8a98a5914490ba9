"""Vectors pushed as themselves, as merged models and as adapters, over real HTTP to the loopback server."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from peft import PeftModel
from support import tiny_models
from support.edited_model import Edited
from support.hub_server import OTHER_TOKEN, HubServer
from transformers import AutoModelForCausalLM

from hf_taskvec import TaskVector
from hf_taskvec.errors import BadValueError, MissingFileError, UnsupportedError

REPO = "me/forget"


def state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_a_pushed_task_vector_comes_back_the_same(hub: HubServer, edited: Edited) -> None:
    pushed = edited.vector.push_to_hub("me/vector", private=True, commit_message="The vector")
    assert hub.history("me/vector")[0].title == "The vector"
    back = TaskVector.load("me/vector", revision=pushed.commit)
    assert back.expression == edited.vector.expression
    for name in edited.vector:
        assert torch.equal(back.dense(name), edited.vector.dense(name))
    with pytest.raises(MissingFileError):
        TaskVector.load("me/vector", token=OTHER_TOKEN)  # it is private


def test_peft_loads_a_pushed_adapter(hub: HubServer, edited: Edited) -> None:
    hub.add_repo("me/base", edited.pair.base)
    hub.add_repo("me/tuned", edited.pair.tuned)
    vector = TaskVector.from_finetuned("me/base", "me/tuned").filter(include="*proj*").compress(rank=4)
    vector.push_adapter_to_hub("me/adapter", scale=-1.0)
    base = AutoModelForCausalLM.from_pretrained("me/base")
    loaded = PeftModel.from_pretrained(base, "me/adapter").merge_and_unload()
    model = AutoModelForCausalLM.from_pretrained("me/base")
    with vector.applied_to(model, -1.0):
        expected = state(model)
    assert all(torch.allclose(loaded.state_dict()[name], expected[name], atol=1e-6) for name in expected)
    # transformers finds the base by the name that the pushed config has.
    assert AutoModelForCausalLM.from_pretrained("me/adapter") is not None
    # An adapter on the Hub is a source for further vectors.
    assert TaskVector.from_adapter("me/adapter").cosine(vector) == pytest.approx(-1.0, abs=1e-6)


def test_a_merge_is_pushed_without_a_folder_of_the_users(hub: HubServer, edited: Edited, tmp_path: Path) -> None:
    pushed = edited.vector.apply(edited.pair.base, push_to=REPO, scale=-0.5)
    merged = edited.vector.apply(edited.pair.base, tmp_path / "out", scale=-0.5)
    assert hub.files(REPO)["model.safetensors"] == (merged / "model.safetensors").read_bytes()
    assert len(hub.history(REPO)) == 2 and pushed.changed


def test_a_scaled_vector_is_pushed_as_such(hub: HubServer, edited: Edited) -> None:
    (-0.5 * edited.vector).push_to_hub("me/vector")
    assert TaskVector.load("me/vector").expression == "-0.5*tuned"


def test_a_merge_is_pushed_by_one_process(edited: Edited, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UnsupportedError, match="in the main one"):
        edited.vector.apply(edited.pair.base, push_to=REPO)


def test_pushing_a_merge_holds_no_model(hub: HubServer, tmp_path: Path) -> None:
    """A model of 150 MB is merged and pushed; the peak of anonymous memory does not follow its size."""
    base = tiny_models.make("llama", hidden_size=1024, intermediate_size=2048, num_hidden_layers=6, vocab_size=1000)
    pair = tiny_models.save_pair(tmp_path, base, tiny_models.tuned_copy(base))
    size = sum(path.stat().st_size for path in pair.base.glob("*.safetensors")) / 2**20
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, threading, time\n"
        "from hf_taskvec import TaskVector\n"
        "import hf_taskvec.publishing.push_without_folder, huggingface_hub.hf_api\n"
        "import hf_taskvec.application.to_checkpoint\n"
        "def anonymous():\n"
        "    return next(int(l.split()[1]) for l in open('/proc/self/status') if l.startswith('RssAnon'))\n"
        "vector = TaskVector.from_finetuned(sys.argv[1], sys.argv[2])\n"
        "before, peak, done = anonymous(), [0], []\n"
        "def watch():\n"
        "    while not done:\n"
        "        peak[0] = max(peak[0], anonymous()); time.sleep(0.002)\n"
        "thread = threading.Thread(target=watch); thread.start()\n"
        "vector.apply(sys.argv[1], push_to='me/large', scale=-0.5)\n"
        "done.append(1); thread.join()\n"
        "print((peak[0] - before) / 1024)\n"
    )
    run = [sys.executable, str(script), str(pair.base), str(pair.tuned)]
    done = subprocess.run(run, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert size > 150
    assert float(done.stdout.splitlines()[-1]) < 100  # 50 with one thread, for any size of the model
    assert len(hub.files("me/large")["model.safetensors"]) > 150 * 2**20


def test_nothing_stays_of_what_was_written_for_a_push(hub: HubServer, edited: Edited, tmp_path: Path) -> None:
    assert edited.vector.apply(edited.pair.base, push_to=REPO, scale=-1, work_folder=tmp_path).changed
    assert list(tmp_path.iterdir()) == []


def test_the_options_of_each_kind_reach_what_writes_it(hub: HubServer, edited: Edited) -> None:
    edited.vector.apply(edited.pair.base, push_to=REPO, dtype="bfloat16", max_shard_size="60KB")
    names = set(hub.files(REPO))
    assert "model.safetensors.index.json" in names and "model.safetensors" not in names
    assert AutoModelForCausalLM.from_pretrained(REPO, dtype="auto").dtype == torch.bfloat16
    small = edited.vector.compress(rank=2)
    with pytest.raises(UnsupportedError, match="not low-rank"):
        small.push_adapter_to_hub("me/adapter", base=edited.pair.base)
    small.push_adapter_to_hub("me/adapter", base=edited.pair.base, base_model_name_or_path="me/base", dense="drop")
    assert json.loads(hub.files("me/adapter")["adapter_config.json"])["base_model_name_or_path"] == "me/base"


@pytest.mark.parametrize(("base_model", "named"), [(None, (None, None)), ("me/base@v2", ("me/base", "v2"))])
def test_a_pushed_adapter_names_the_hub_id_of_its_base_and_no_folder(
    hub: HubServer, edited: Edited, base_model: str | None, named: tuple[str | None, str | None]
) -> None:
    small = edited.vector.compress(rank=2)
    small.push_adapter_to_hub("me/adapter", base=edited.pair.base, dense="drop", base_model=base_model)
    config = json.loads(hub.files("me/adapter")["adapter_config.json"])
    assert (config["base_model_name_or_path"], config["revision"]) == named
    assert not any(str(edited.pair.base.parent).encode() in content for content in hub.files("me/adapter").values())


def test_a_base_is_taken_at_its_revision_and_the_push_goes_to_another(hub: HubServer, edited: Edited) -> None:
    first = hub.add_repo("me/base", edited.pair.base)
    hub.add_repo("me/base", edited.pair.tuned)  # main moves on
    pushed = edited.vector.apply("me/base", push_to=f"{REPO}@forget-v1", revision=first)
    assert set(hub.files(REPO)) == {".gitattributes"}
    record = json.loads(hub.files(REPO, "forget-v1")["taskvec_apply.json"])
    assert record["base"]["revision"] == first and pushed.changed


def test_the_card_of_each_kind_has_the_options_for_it(hub: HubServer, edited: Edited) -> None:
    low_rank = edited.vector.filter(include="*proj*").compress(rank=2)
    low_rank.push_to_hub("me/v", base_model="me/base", purpose="to see it", datasets=["me/books"])
    low_rank.push_adapter_to_hub(
        "me/a", base=edited.pair.base, base_model="me/base", purpose="to see it", datasets=["me/books"]
    )
    low_rank.apply(
        edited.pair.base,
        push_to=REPO,
        base_model="me/base",
        purpose="to see it",
        datasets=["me/books"],
        commit_description="Why.",
    )
    assert hub.history(REPO)[0].message == "Why."
    for repository in ("me/v", "me/a", REPO):
        card = hub.files(repository)["README.md"].decode()
        assert "to see it." in card and "me/books" in card and "base_model: me/base\n" in card, repository


@pytest.mark.parametrize("kind", ["vector", "adapter", "model"])
def test_an_option_that_does_not_exist_is_no_option(hub: HubServer, edited: Edited, kind: str) -> None:
    pushes: dict[str, Callable[..., object]] = {
        "vector": edited.vector.push_to_hub,
        "adapter": edited.vector.push_adapter_to_hub,
        "model": lambda where, **options: edited.vector.apply(edited.pair.base, push_to=where, **options),
    }
    with pytest.raises(TypeError, match="privat"):
        pushes[kind](REPO, privat=True)
    assert hub.count("/api/repos/create") == 0


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({}, "either output=, a folder, or push_to="),
        ({"output": "out", "push_to": REPO}, "either output=, a folder, or push_to="),
        ({"push_to": REPO, "overwrite": True}, "overwrite= is for output="),
        ({"output": "out", "private": True, "purpose": "x"}, "private, purpose with push_to="),
        ({"output": "out", "work_folder": "work"}, "work_folder with push_to="),
        ({"push_to": "no/such/name"}, "not a name for a Hub repository"),
    ],
)
def test_a_model_goes_to_one_place_and_is_told_what_belongs_there(
    hub: HubServer, edited: Edited, wrong: dict[str, object], message: str
) -> None:
    with pytest.raises(BadValueError, match=message):
        cast("Any", edited.vector).apply(edited.pair.base, **wrong)
    assert not Path("out").exists() and hub.count("/api/repos/create") == 0
