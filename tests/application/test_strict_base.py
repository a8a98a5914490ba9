"""`strict_base=True`: the base, byte for byte, or a refusal."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.hub_server import HubServer
from support.tiny_adapters import adapter
from support.tiny_models import Pair, TinyModels, make, tuned_copy
from transformers import AutoModelForCausalLM

from hf_taskvec import TaskVector
from hf_taskvec.errors import ChangedSourceError
from hf_taskvec.files.vector_schema import checksum
from hf_taskvec.models.checkpoint import open_checkpoint

# Large enough that fingerprints leave most of it out.
SIZE = {"vocab_size": 600, "hidden_size": 64}


@pytest.fixture
def pair(models: TinyModels) -> Pair:
    return models.pair("llama", **SIZE)


@pytest.fixture
def changed(pair: Pair, tmp_path: Path) -> Path:
    """The base with one element changed, where no sample looks."""
    folder = tmp_path / "changed"
    shutil.copytree(pair.base, folder)
    tensors = load_file(folder / "model.safetensors")
    flat = tensors["model.embed_tokens.weight"].view(-1)
    flat[flat.numel() // 4] += 1.0
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert open_checkpoint(folder).sampled_fingerprint == open_checkpoint(pair.base).sampled_fingerprint
    return folder


@pytest.fixture
def copied(pair: Pair, tmp_path: Path) -> Path:
    """The base in another folder, in several files."""
    model = AutoModelForCausalLM.from_pretrained(pair.base)
    model.save_pretrained(tmp_path / "copied", max_shard_size="100KB")
    return tmp_path / "copied"


def saved(vector: TaskVector, folder: Path) -> TaskVector:
    return TaskVector.load(vector.save(folder))


@pytest.mark.parametrize("way", ["files", "saved", "live", "a sum", "filtered", "compressed", "reference"])
def test_only_the_base_itself_passes(pair: Pair, changed: Path, copied: Path, tmp_path: Path, way: str) -> None:
    whole = pair.vector()
    if way == "live":
        live = (AutoModelForCausalLM.from_pretrained(folder) for folder in (pair.base, pair.tuned))
        vector = saved(TaskVector.from_finetuned(*live), tmp_path / "vector").filter(include="*.mlp.*")
    elif way == "a sum":
        other = tmp_path / "other"
        tuned_copy(AutoModelForCausalLM.from_pretrained(pair.base), seed=2).save_pretrained(other)
        vector = saved(whole - 0.5 * TaskVector.from_finetuned(pair.base, other), tmp_path / "vector")
    else:
        vector = {
            "files": lambda: whole,
            "saved": lambda: saved(whole, tmp_path / "vector"),
            "filtered": lambda: whole.filter(include="*.mlp.*"),
            "compressed": lambda: whole.filter(include="*.mlp.*").compress(rank=1),
            "reference": lambda: TaskVector.load(whole.save(tmp_path / "vector", reference=True)),
        }[way]()
    for folder in (pair.base, copied):
        vector.apply(folder, tmp_path / f"on {folder.name}", strict_base=True)
    for folder in (changed, pair.tuned):
        with pytest.raises(ChangedSourceError, match=f"{folder.name} is not the base that this vector was made"):
            vector.apply(folder, tmp_path / "out", strict_base=True)
    vector.apply(changed, tmp_path / "out")


def test_a_vector_of_before_knows_the_digest_of_all_bytes_at_once(pair: Pair, changed: Path, tmp_path: Path) -> None:
    folder = pair.vector().save(tmp_path / "old")
    record = json.loads((folder / "taskvec.json").read_text())
    tensors, digest = load_file(pair.base / "model.safetensors"), hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        content = hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        digest.update(f"{name}|{list(tensor.shape)}|{tensor.dtype}|{content}\n".encode())
    record["provenance"]["origins"][0]["base"]["sha256"] = digest.hexdigest()
    (folder / "taskvec.json").write_text(json.dumps(record | {"checksum": checksum(record)}))
    TaskVector.load(folder).apply(pair.base, tmp_path / "same", strict_base=True)
    with pytest.raises(ChangedSourceError, match="is not the base that this vector was made"):
        TaskVector.load(folder).apply(changed, tmp_path / "out", strict_base=True)


def test_a_vector_that_knows_samples_only_is_refused(pair: Pair, tmp_path: Path) -> None:
    made = adapter(pair.base, tmp_path / "adapter", target_modules=["q_proj"]).vector()
    made.apply(pair.base, tmp_path / "at once", strict_base=True)
    small = pair.vector().filter(include="*.mlp.*")
    old = pair.vector().save(tmp_path / "old")
    record = json.loads((old / "taskvec.json").read_text())
    del record["provenance"]["origins"][0]["base"]["sha256"]
    (old / "taskvec.json").write_text(json.dumps(record | {"checksum": checksum(record)}))
    for vector in (saved(made, tmp_path / "lora"), saved(small, tmp_path / "small"), TaskVector.load(old)):
        with pytest.raises(ChangedSourceError, match="no more of its base than its name and samples"):
            vector.apply(pair.base, tmp_path / "out", strict_base=True)
    edited = TaskVector.from_tensors({"model.norm.weight": torch.ones(64)})
    with pytest.raises(ChangedSourceError, match="recorded no base"):
        edited.apply(pair.base, tmp_path / "out", strict_base=True)


def test_the_hubs_own_digests_tell_the_base(pair: Pair, changed: Path, hub: HubServer, tmp_path: Path) -> None:
    hub.add_repo("me/base", pair.base)
    hub.add_repo("me/changed", changed)
    small = TaskVector.from_finetuned("me/base", pair.tuned).filter(include="*.mlp.*")
    vector = saved(small, tmp_path / "vector")
    assert vector.provenance.origins[0].base.files
    for base in ("me/base", pair.base):
        vector.apply(base, tmp_path / f"on {str(base)[:2]}", strict_base=True)
    with pytest.raises(ChangedSourceError, match="cannot tell whether me/changed"):
        vector.apply("me/changed", tmp_path / "out", strict_base=True)


def test_a_gradient_knows_every_byte_of_its_model(tmp_path: Path) -> None:
    model = make("llama", **SIZE)
    model.save_pretrained(tmp_path / "base")
    vector = TaskVector.from_gradient(model, [[1, 2, 3, 4]], 0.1, progress=False)
    vector.apply(tmp_path / "base", tmp_path / "out", strict_base=True)
    with torch.no_grad():
        model.model.embed_tokens.weight.view(-1)[SIZE["vocab_size"] * 16] += 1.0
    model.save_pretrained(tmp_path / "changed")
    with pytest.raises(ChangedSourceError, match="is not the base"):
        vector.apply(tmp_path / "changed", tmp_path / "other", strict_base=True)
