"""Where models and adapters come from: Trainer's folders, the Hub's cache, folders in repositories, variants."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import snapshot_download
from safetensors.torch import load_file
from support.hub_server import HubServer
from support.tiny_adapters import adapter
from support.tiny_models import TinyModels, assert_gives_tuned, make, save_pair, tuned_copy
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from typer.testing import CliRunner

from hf_taskvec import TaskVector
from hf_taskvec.cli.app import app
from hf_taskvec.errors import MismatchError, MissingFileError
from hf_taskvec.extraction.from_any import open_vector
from hf_taskvec.models.loading import load_for_evaluation

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What transformers' Trainer leaves of two steps: `base`, and `run` with a checkpoint after each."""
    folder = tmp_path_factory.mktemp("trained")
    model = make("llama")
    model.save_pretrained(folder / "base")
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(3, 20, (4, 8)).tolist()]
    settings = TrainingArguments(
        folder / "run", max_steps=2, save_steps=1, per_device_train_batch_size=2, report_to=[], use_cpu=True
    )
    Trainer(model, settings, train_dataset=rows).train()
    model.save_pretrained(folder / "expected")
    return folder


def test_a_checkpoint_of_trainer_is_read_as_it_is(trained: Path, tmp_path: Path) -> None:
    checkpoint = trained / "run" / "checkpoint-2"
    assert {"optimizer.pt", "trainer_state.json", "training_args.bin"} <= {path.name for path in checkpoint.iterdir()}
    vector = open_vector(checkpoint, trained / "base")
    output = vector.apply(trained / "base", tmp_path / "out")
    expected = load_file(trained / "expected" / WEIGHTS)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in load_file(output / WEIGHTS).items())
    # of a checkpoint as the base nothing of the training comes along
    other = (-vector).apply(checkpoint, tmp_path / "back")
    assert {path.suffix for path in other.iterdir()} <= {".json", ".safetensors"}
    assert "trainer_state.json" not in {path.name for path in other.iterdir()}


def test_the_folder_of_a_training_tells_of_its_checkpoints(trained: Path, models: TinyModels, tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match=r"It holds checkpoint-1, checkpoint-2 of a training: give one of them"):
        TaskVector.from_finetuned(trained / "base", trained / "run")
    base = models.pair("llama").base
    made = adapter(base, tmp_path / "run" / "checkpoint-10", target_modules=["q_proj"])
    (made.folder / "optimizer.pt").write_bytes(b"no pickle is read")
    with pytest.raises(MissingFileError, match=r"run has no adapter_config.json. It holds checkpoint-10 of a training"):
        TaskVector.from_adapter(tmp_path / "run")
    assert len(open_vector(made.folder)) == len(made.vector()) == 2


def test_the_hub_s_cache_is_a_place_like_others(hub: HubServer, models: TinyModels) -> None:
    pair = models.pair("phi")
    hub.add_repo("me/base", pair.base)
    hub.add_repo("me/tuned", pair.tuned)
    snapshots = [Path(snapshot_download(name)) for name in ("me/base", "me/tuned")]
    for places in (snapshots, [each.parents[1] for each in snapshots]):
        vector = TaskVector.from_finetuned(*places)
        assert_gives_tuned(vector, pair)
        assert next(origin.base.name for origin in vector.provenance.origins if origin.base) in (
            "me/base",
            snapshots[0].name,
        )
    (snapshots[1].parents[1] / "refs" / "main").write_text("../../../etc")
    with pytest.raises(MissingFileError, match="no snapshot of its main branch"):
        TaskVector.from_finetuned(snapshots[0], snapshots[1].parents[1])


def test_a_folder_in_a_repository_is_named_after_a_colon(hub: HubServer, models: TinyModels, tmp_path: Path) -> None:
    pair = models.pair("phi")
    made = adapter(pair.base, tmp_path / "lora", target_modules=["q_proj"])
    folder = tmp_path / "repository"
    for name, source in (("base", pair.base), ("runs/checkpoint-5", pair.tuned), ("lora", made.folder)):
        shutil.copytree(source, folder / name)
    first = hub.add_repo("me/many", folder)
    hub.add_repo("me/many", {"README.md": b"empty now"})
    base, tuned = f"me/many@{first}:base", f"me/many@{first}:runs/checkpoint-5"
    vector = TaskVector.from_finetuned(base, tuned)
    assert_gives_tuned(vector, pair)
    (origin,) = vector.provenance.origins
    assert origin.base is not None and (origin.base.name, origin.base.revision) == ("me/many:base", first)
    output = open_vector(tuned, base).apply(base, tmp_path / "out")
    assert (output / WEIGHTS).read_bytes() == (vector.apply(pair.base, tmp_path / "same") / WEIGHTS).read_bytes()
    assert len(TaskVector.from_adapter(f"me/many@{first}:lora", base=base)) == 2
    vector.save(tmp_path / "reference", reference=True)
    assert_gives_tuned(TaskVector.load(tmp_path / "reference"), pair)
    loaded = load_for_evaluation(tuned)
    assert torch.equal(loaded.lm_head.weight, AutoModelForCausalLM.from_pretrained(pair.tuned).lm_head.weight)
    for wrong in ("me/many:base", f"me/many@{first}:other", "me/many:../base"):
        with pytest.raises(MissingFileError, match=r"has no folder|neither|no folder"):
            TaskVector.from_finetuned(base, wrong)
    shown = CliRunner().invoke(app, ["extract", base, tuned, "--output", str(tmp_path / "v"), "--dry-run"])
    assert shown.exit_code == 0, shown.output


def _as_variant(folder: Path, output: Path, variant: str, **options: str) -> Path:
    AutoModelForCausalLM.from_pretrained(folder).half().save_pretrained(output, variant=variant, **options)
    return output


@pytest.mark.parametrize("options", [{}, {"max_shard_size": "4KB"}], ids=["whole", "sharded"])
def test_a_variant_is_the_model_where_there_is_no_other(options: dict[str, str], tmp_path: Path) -> None:
    base = make("llama", torch.float16)
    pair = save_pair(tmp_path, base, tuned_copy(base))
    other = _as_variant(pair.tuned, tmp_path / "variant", "fp16", **options)
    assert not (other / WEIGHTS).exists()
    assert_gives_tuned(TaskVector.from_finetuned(pair.base, other), pair)
    output = pair.vector().apply(_as_variant(pair.base, tmp_path / "v", "fp16", **options), tmp_path / "out")
    found, expected = (AutoModelForCausalLM.from_pretrained(each).state_dict() for each in (output, pair.tuned))
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
    if not options:  # beside the plain files the variant is left alone; of two, nobody knows which is meant
        shutil.copyfile(other / "model.fp16.safetensors", pair.base / "model.fp16.safetensors")
        assert_gives_tuned(pair.vector(), pair)
        shutil.copyfile(other / "model.fp16.safetensors", other / "model.bf16.safetensors")
        with pytest.raises(MismatchError, match=r"several variants of a model \(bf16, fp16\)"):
            TaskVector.from_finetuned(pair.base, other)
    assert json.loads((output / "config.json").read_text())["model_type"] == "llama"
