"""Merged models from Hub to Hub: read by byte range, uploaded shard by shard, nothing of a model on memory or disk."""

import json
import random
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support import launch, tiny_models, tiny_quantised
from support.hub_server import HubServer
from support.tiny_models import Pair
from transformers import AutoModelForCausalLM

from hf_taskvec import TaskVector
from hf_taskvec.errors import HubError, MismatchError, MissingFileError
from hf_taskvec.models import remote_files
from hf_taskvec.publishing import uploaded_shards

REPO = "me/merged"


@pytest.fixture
def pair(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pair:
    """A base and a fine-tune in several shards, in folders and on the Hub."""
    monkeypatch.setattr(remote_files, "_WAIT", 0.0)
    monkeypatch.setattr(uploaded_shards, "_WAIT", 0.0)
    base = tiny_models.make("llama", dtype=torch.bfloat16, num_hidden_layers=4)
    pair = tiny_models.save_pair(tmp_path, base, tiny_models.tuned_copy(base), max_shard_size="5KB")
    hub.add_repo("me/base", pair.base)
    hub.add_repo("me/tuned", pair.tuned)
    return pair


def weights(files: dict[str, bytes]) -> dict[str, bytes]:
    return {name: content for name, content in files.items() if name.endswith((".safetensors", ".index.json"))}


def on_disk(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def low_rank(pair: Pair) -> TaskVector:
    return tiny_models.low_rank(AutoModelForCausalLM.from_pretrained(pair.base), size=0.02)


@pytest.mark.parametrize("kind", ["full", "low-rank", "both"])
def test_the_bytes_are_those_of_the_local_way_and_no_weights_are_downloaded(
    hub: HubServer, pair: Pair, tmp_path: Path, kind: str
) -> None:
    remote = TaskVector.from_finetuned("me/base", "me/tuned", stream=True)
    local, low = TaskVector.from_finetuned(pair.base, pair.tuned), low_rank(pair)
    vectors = {"full": (remote, local), "low-rank": (low, low), "both": (remote - 0.4 * low, local - 0.4 * low)}
    streamed, plain = vectors[kind]
    pushed = streamed.apply("me/base", push_to=REPO, scale=-0.6, work_folder=tmp_path / "work")
    expected = on_disk(plain.apply(pair.base, tmp_path / "out", scale=-0.6))
    assert weights(hub.files(REPO)) == weights(expected) and len(weights(expected)) > 4
    assert pushed.changed and len(hub.history(REPO)) == 2  # the first is that of the repository itself
    assert not any(path.suffix == ".safetensors" for path in hub.home.rglob("*"))
    assert list((tmp_path / "work").iterdir()) == []
    assert {"config.json", "README.md", "taskvec_apply.json"} <= hub.files(REPO).keys()
    record = json.loads(hub.files(REPO)["taskvec_apply.json"])
    reference = TaskVector.from_finetuned("me/base", "me/tuned") if kind == "full" else None
    if reference is not None:  # downloaded: the record tells the same of both models
        downloaded = json.loads(
            (reference.apply("me/base", tmp_path / "whole", scale=-0.6) / "taskvec_apply.json").read_text()
        )
        assert record == downloaded | {"fingerprint": record["fingerprint"]}
    # Once more: the Hub has it all, and gets no commit.
    assert not streamed.apply("me/base", push_to=REPO, scale=-0.6).changed
    assert AutoModelForCausalLM.from_pretrained(REPO) is not None


@pytest.mark.parametrize("choice", ["same", "bf16"])
def test_a_base_in_fewer_bits_is_pushed_as_it_is_written(hub: HubServer, tmp_path: Path, choice: str) -> None:
    model = tiny_quantised.llama()
    base = tiny_quantised.fp8(tmp_path / "base", model, (32, 32))
    hub.add_repo("me/fp8", base)
    vector = tiny_models.low_rank(model, size=0.05)
    options: dict[str, Any] = {"requantise": choice, "max_shard_size": "40KB", "scale": -0.6}
    expected = on_disk(vector.apply(base, tmp_path / "out", **options))
    vector.apply("me/fp8", push_to=REPO, **options)
    assert weights(hub.files(REPO)) == weights(expected) and len(weights(expected)) > 2
    told = [json.loads(each["taskvec_apply.json"]) for each in (hub.files(REPO), expected)]
    assert told[0].get("requantised") == told[1].get("requantised") and ("requantised" in told[1]) == (choice == "same")


def test_no_more_than_a_shard_is_on_the_disk(
    hub: HubServer, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    largest, seen = max(path.stat().st_size for path in pair.base.glob("*.safetensors")), []
    take = uploaded_shards.ShardUploads.take

    def watched(self: uploaded_shards.ShardUploads, path: Path) -> None:
        seen.append(sum(each.stat().st_blocks * 512 for each in path.parent.iterdir() if each.suffix == ".safetensors"))
        take(self, path)

    monkeypatch.setattr(uploaded_shards.ShardUploads, "take", watched)
    TaskVector.from_finetuned("me/base", "me/tuned", stream=True).apply("me/base", push_to=REPO)
    count = len(list(pair.base.glob("*.safetensors")))
    assert len(seen) == count > 3
    assert max(seen) <= largest + count * 8192  # of the others a note each


def test_a_mismatch_is_found_before_anything_is_read_or_made(hub: HubServer, pair: Pair) -> None:
    other = tiny_models.make("llama", hidden_size=32, dtype=torch.bfloat16)
    other.save_pretrained(pair.base.parent / "other")
    hub.add_repo("me/other", pair.base.parent / "other")
    vector = TaskVector.from_finetuned("me/base", "me/tuned", stream=True)
    before = hub.bytes_served("GET")
    with pytest.raises(MismatchError, match="names match"):
        vector.apply("me/other", push_to=REPO)
    served = hub.bytes_served("GET") - before
    assert hub.count("/api/repos/create") == 0
    with pytest.raises(MissingFileError, match="no weights in safetensors"):
        hub.add_repo("me/old", {"config.json": (pair.base / "config.json").read_bytes(), "pytorch_model.bin": b"x"})
        TaskVector.from_finetuned("me/old", "me/tuned", stream=True)
    assert served < 400_000


def test_dropped_connections_are_asked_again(hub: HubServer, pair: Pair, tmp_path: Path) -> None:
    vector = TaskVector.from_finetuned("me/base", "me/tuned", stream=True)
    hub.drop_next_download(f"GET {hub.cdn_url}", after_bytes=100, times=3)
    hub.fail_next(f"GET {hub.cdn_url}", status=503, times=2)
    hub.drop_next_upload(after_bytes=100, times=2)
    vector.apply("me/base", push_to=REPO, scale=0.5)
    expected = TaskVector.from_finetuned(pair.base, pair.tuned).apply(pair.base, tmp_path / "out", scale=0.5)
    assert weights(hub.files(REPO)) == weights(on_disk(expected))


@pytest.mark.parametrize("where", ["upload", "download", "commit"])
def test_a_push_that_failed_goes_on_where_it_was(hub: HubServer, pair: Pair, tmp_path: Path, where: str) -> None:
    vector, work = TaskVector.from_finetuned("me/base", "me/tuned", stream=True), tmp_path / "work"
    total = len(list(pair.base.glob("*.safetensors")))
    # The third shard fails however often it is asked; or the commit, when all were uploaded.
    real, done = uploaded_shards.ShardUploads.take, []

    def take(self: uploaded_shards.ShardUploads, path: Path) -> None:
        if where == "upload" and len(done) == 2:
            hub.fail_next("/info/lfs/objects/batch", status=400, times=50)
        real(self, path)
        done.append(path.name)
        if where == "download" and len(done) == 2:
            remote_files._kept.clear()
            hub.fail_next(f"GET {hub.cdn_url}", status=404, times=200)

    if where == "commit":
        hub.fail_next(f"/api/models/{REPO}/commit/", status=403)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(uploaded_shards.ShardUploads, "take", take)
        with pytest.raises(HubError):
            vector.apply("me/base", push_to=REPO, scale=0.5, work_folder=work)
    assert len(hub.history(REPO)) == 1 and len(done) == (total if where == "commit" else 2)  # nothing was published
    hub._faults.clear()
    uploads = hub.count(f"PUT {hub.cdn_url}")
    vector.apply("me/base", push_to=REPO, scale=0.5, work_folder=work)
    assert hub.count(f"PUT {hub.cdn_url}") - uploads == total - len(done)
    expected = TaskVector.from_finetuned(pair.base, pair.tuned).apply(pair.base, tmp_path / "out", scale=0.5)
    assert weights(hub.files(REPO)) == weights(on_disk(expected))
    assert list(work.iterdir()) == []


def test_a_damaged_header_is_refused(hub: HubServer, pair: Pair, tmp_path: Path) -> None:
    shutil.copytree(pair.tuned, tmp_path / "damaged")
    shard = min((tmp_path / "damaged").glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    for damage in (b"\xff" * 8, b"\0" * 8, (10**6).to_bytes(8, "little")):
        content[:8] = damage
        shard.write_bytes(bytes(content))
        hub.add_repo("me/damaged", tmp_path / "damaged")
        with pytest.raises(ValueError, match="damaged or not a safetensors file"):
            TaskVector.from_finetuned("me/base", "me/damaged", stream=True)


_PUSHING = """
import sys
from hf_taskvec import TaskVector
vector = TaskVector.from_finetuned("me/base", "me/tuned", stream=True)
vector.apply("me/base", push_to="me/merged", scale=-0.6, max_shard_size="1KB", work_folder=sys.argv[1], threads=1)
"""


@pytest.mark.parametrize("kills", [2, pytest.param(6, marks=pytest.mark.slow)])
def test_a_push_that_is_killed_goes_on_and_sends_no_shard_twice(
    hub: HubServer, pair: Pair, tmp_path: Path, kills: int
) -> None:
    """SIGKILL, when so many more shards are at the Hub and some milliseconds later; then once to the end."""
    script, work, draw = tmp_path / "pushing.py", tmp_path / "work", random.Random(0)
    script.write_text(_PUSHING)
    expected = on_disk(pair.vector().apply(pair.base, tmp_path / "out", scale=-0.6, max_shard_size="1KB"))
    total = sum(name.endswith(".safetensors") for name in expected)
    steps, at_hub = max(1, total // (kills + 2)), 0

    def uploads() -> list[str]:
        return [each.line for each in hub.log if each.line.startswith(f"PUT {hub.cdn_url}") and each.status == 200]

    for _ in range(kills):
        pushing = launch.start(script, work, stderr=tmp_path / "said")
        while pushing.running() and len(uploads()) < at_hub + steps:
            time.sleep(0.001)
        assert pushing.running(), (tmp_path / "said").read_text()[-3000:]
        time.sleep(draw.random() * 0.02)
        pushing.kill()
        at_hub = len(uploads())
        assert at_hub < total and len(hub.history(REPO)) == 1  # nothing is published yet
    launch.succeed(script, work)
    assert len(uploads()) == total and len(set(uploads())) == total
    assert weights(hub.files(REPO)) == weights(expected) and total > 10
    assert list(work.iterdir()) == [] and len(hub.history(REPO)) == 2
