"""Full fine-tunes: exact for every architecture and dtype, wherever the models are; bad input refused by name."""

import json
import math
import pickle
import shutil
import struct
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.hub_server import HubServer
from support.tiny_classes import CLASSES
from support.tiny_models import (
    ARCHITECTURES,
    DTYPES,
    EXPERTS,
    Pair,
    TinyModels,
    added,
    assert_gives_tuned,
    make,
    save_pair,
    shake,
    tensors,
    tuned_copy,
)
from transformers import AutoModelForCausalLM

from hf_taskvec import TaskVector, TaskVectorError
from hf_taskvec.algebra.sources import InMemory
from hf_taskvec.errors import BadValueError, MismatchError, TaskVectorWarning
from hf_taskvec.extraction.from_finetuned import from_finetuned
from hf_taskvec.models.checkpoint import open_checkpoint

WEIGHTS = "model.safetensors"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_vector_gives_the_tuned_weights_wherever_the_models_are(
    architecture: str, dtype: torch.dtype, models: TinyModels, tmp_path: Path
) -> None:
    """Folder and folder, live and live, live and folder; saved and loaded again: the tuned weights, bit for bit."""
    pair = models.pair(architecture, dtype)
    base, tuned = (AutoModelForCausalLM.from_pretrained(f, dtype=dtype) for f in (pair.base, pair.tuned))
    vectors = {
        "folders": pair.vector(),
        "live": TaskVector.from_finetuned(base, tuned),
        "live base": TaskVector.from_finetuned(base, pair.tuned),
        "live fine-tune": TaskVector.from_finetuned(pair.base, tuned),
    }
    for kind in ("folders", "live"):
        vectors[kind].save(tmp_path / kind)
        vectors[f"{kind}, saved"] = TaskVector.load(tmp_path / kind)
    names = set(tensors(pair.base))
    fingerprints = set()
    for kind, vector in vectors.items():
        assert set(vector) == names, kind
        assert_gives_tuned(vector, pair)
        origin = vector.provenance.origins[0]
        fingerprints.add((origin.base.fingerprint, origin.tuned.fingerprint))
    assert len(fingerprints) == 1  # live or on disk, the models are recognised


def test_extracting_from_live_models_shows_its_progress(models: TinyModels, capsys: pytest.CaptureFixture[str]) -> None:
    pair = models.pair("llama")
    live = AutoModelForCausalLM.from_pretrained(pair.base)
    capsys.readouterr()
    vector = from_finetuned(live, pair.tuned, progress=True)
    assert "Extracting: 100%" in capsys.readouterr().err
    assert from_finetuned(pair.base, pair.tuned, progress=True).keys() == vector.keys()
    assert capsys.readouterr().err == ""  # of files nothing is read yet


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "phi", "gpt_neox"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_head_is_one_parameter_and_an_untied_one_is_two(
    architecture: str, tied: bool, models: TinyModels
) -> None:
    pair = models.pair(architecture, tie_word_embeddings=tied)
    vector = pair.vector()
    heads = [name for name in vector if name.startswith(("lm_head", "embed_out")) and name.endswith("weight")]
    assert bool(heads) != tied
    assert_gives_tuned(vector, pair)
    live = (AutoModelForCausalLM.from_pretrained(f, dtype=torch.float32) for f in (pair.base, pair.tuned))
    assert_gives_tuned(TaskVector.from_finetuned(*live), pair)


@pytest.mark.parametrize("architecture", EXPERTS)
def test_experts_are_named_one_by_one(architecture: str, models: TinyModels) -> None:
    live = (AutoModelForCausalLM.from_pretrained(f) for f in vars(models.pair(architecture)).values())
    vector = TaskVector.from_finetuned(*live)
    assert any(".experts.0." in name for name in vector) and any(".experts.1." in name for name in vector)


def test_another_scale_is_the_exact_change_rounded_once(models: TinyModels) -> None:
    pair = models.pair("phi")
    vector, base, tuned = pair.vector(), tensors(pair.base), tensors(pair.tuned)
    for name in vector:
        change = tuned[name].read().double() - base[name].read().double()
        assert torch.equal(vector.dense(name, "float64"), change)
        torch.testing.assert_close(added(vector, name, base[name], -0.6).double(), base[name].read() - 0.6 * change)
        negated = added(-vector, name, base[name])
        assert torch.equal(negated, (base[name].read().double() - change).float())


def test_the_provenance_names_both_models_and_no_path(models: TinyModels) -> None:
    pair = models.pair("phi")
    vector = TaskVector.from_finetuned(pair.base, pair.tuned, name="hp1")
    (origin,) = vector.provenance.origins
    assert vector.expression == "hp1"
    assert (origin.base.name, origin.tuned.name) == ("base", "tuned")
    assert origin.base.architecture == "PhiForCausalLM"
    assert origin.base.fingerprint == open_checkpoint(pair.base).sampled_fingerprint != origin.tuned.fingerprint
    assert "full fine-tune" in repr(vector)
    assert str(pair.base.parent) not in repr(vector)


def test_extraction_folds_with_itself(models: TinyModels) -> None:
    pair = models.pair("phi")
    assert len(pair.vector() - TaskVector.from_finetuned(str(pair.base), str(pair.tuned))) == 0


# Where models come from.


def test_models_come_from_the_hub_by_revision(models: TinyModels, hub: HubServer) -> None:
    pair, other = models.pair("llama"), models.pair("llama", torch.bfloat16)
    first = hub.add_repo("me/base", pair.base)
    hub.add_repo("me/base", other.base)
    hub.add_repo("me/tuned", other.tuned)
    second = hub.add_repo("me/tuned", pair.tuned, revision="v2")
    for vector in (
        TaskVector.from_finetuned("me/base", "me/tuned", base_revision=first, tuned_revision="v2"),
        TaskVector.from_finetuned(f"me/base@{first}", "me/tuned@v2"),
    ):
        assert_gives_tuned(vector, pair)
        (origin,) = vector.provenance.origins
        assert (origin.base.name, origin.base.revision) == ("me/base", first)
        assert (origin.tuned.name, origin.tuned.revision) == ("me/tuned", second)
        assert dict(origin.base.files)[WEIGHTS]
        assert vector.expression == "tuned"
    assert_gives_tuned(TaskVector.from_finetuned("me/base", "me/tuned"), other)


def test_only_what_is_needed_is_downloaded(models: TinyModels, hub: HubServer, tmp_path: Path) -> None:
    pair = models.pair("llama")
    files = {p.name: p.read_bytes() for p in pair.base.iterdir()}
    hub.add_repo("me/base", {**files, "pytorch_model.bin": b"pickled", "flax_model.msgpack": b"flax"})
    TaskVector.from_finetuned("me/base", pair.tuned)
    assert hub.count("pytorch_model.bin") == hub.count("msgpack") == 0


def test_bin_files_come_from_the_hub(models: TinyModels, hub: HubServer) -> None:
    pair = models.pair("llama")
    hub.add_repo("me/old", {p.name: p.read_bytes() for p in as_bin(pair.base, pair.base.parent / "hub").iterdir()})
    assert_gives_tuned(TaskVector.from_finetuned("me/old", pair.tuned), pair)


@pytest.mark.parametrize("where", ["me/nothing", "me/base@nothing", "not a repo!"])
def test_what_the_hub_does_not_have_is_named(where: str, models: TinyModels, hub: HubServer) -> None:
    pair = models.pair("llama")
    hub.add_repo("me/base", pair.base)
    with pytest.raises(TaskVectorError, match=f"{where.split('@')[0]!r} is neither a folder here nor a repository"):
        TaskVector.from_finetuned(where, pair.tuned)


def test_a_folder_that_is_not_there_is_named(models: TinyModels, tmp_path: Path) -> None:
    for where in (tmp_path / "nowhere", str(tmp_path / "nowhere"), "./nowhere"):
        with pytest.raises(TaskVectorError, match="no folder 'nowhere'"):
            TaskVector.from_finetuned(where, models.pair("llama").tuned)


def as_bin(folder: Path, to: Path, legacy: bool = False) -> Path:
    shutil.copytree(folder, to)
    state = load_file(to / WEIGHTS)
    torch.save(state, to / "pytorch_model.bin", _use_new_zipfile_serialization=not legacy)
    (to / WEIGHTS).unlink()
    return to


@pytest.mark.parametrize("legacy", [False, True])
def test_bin_files_give_the_same_vector(models: TinyModels, tmp_path: Path, legacy: bool) -> None:
    pair = models.pair("gpt2", torch.bfloat16)
    old = Pair(as_bin(pair.base, tmp_path / "base", legacy), as_bin(pair.tuned, tmp_path / "tuned", legacy))
    for vector in (old.vector(), TaskVector.from_finetuned(pair.base, old.tuned)):
        assert_gives_tuned(vector, pair)


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_shards_give_the_same_vector(models: TinyModels, tmp_path: Path, kind: str) -> None:
    pair = models.pair("phi")
    sharded = tmp_path / "sharded"
    AutoModelForCausalLM.from_pretrained(pair.tuned).save_pretrained(sharded, max_shard_size="5KB")
    index = json.loads((sharded / f"{WEIGHTS}.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    if kind == "bin":
        for shard in sorted(set(index["weight_map"].values())):
            torch.save(load_file(sharded / shard), sharded / shard.replace(".safetensors", ".bin"))
            (sharded / shard).unlink()
        index["weight_map"] = {n: f.replace(".safetensors", ".bin") for n, f in index["weight_map"].items()}
        (sharded / "pytorch_model.bin.index.json").write_text(json.dumps(index))
        (sharded / f"{WEIGHTS}.index.json").unlink()
    vector = TaskVector.from_finetuned(pair.base, sharded)
    assert_gives_tuned(vector, pair)
    # The fingerprint is that of the weights, not of the files.
    assert vector.provenance.origins[0].tuned.fingerprint == open_checkpoint(pair.tuned).sampled_fingerprint


def hub_gpt2(folder: Path, to: Path) -> Path:
    """The layout of the Hub's own gpt2: no prefix, and the causal mask stored as if it were a weight."""
    shutil.copytree(folder, to)
    state = {name.removeprefix("transformer."): each for name, each in load_file(to / WEIGHTS).items()}
    for layer in range(2):
        state[f"h.{layer}.attn.bias"] = torch.ones(1, 1, 8, 8).tril()
        state[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(state, to / WEIGHTS, {"format": "pt"})
    return to


def test_gpt2_as_on_the_hub_and_as_saved_anew_have_the_same_names(models: TinyModels, tmp_path: Path) -> None:
    pair = models.pair("gpt2")
    raw = Pair(hub_gpt2(pair.base, tmp_path / "base"), hub_gpt2(pair.tuned, tmp_path / "tuned"))
    for vector in (
        TaskVector.from_finetuned(raw.base, pair.tuned),
        TaskVector.from_finetuned(pair.base, raw.tuned),
        raw.vector(),
        TaskVector.from_finetuned(AutoModelForCausalLM.from_pretrained(pair.base), raw.tuned),
    ):
        assert set(vector) == set(pair.vector())
        assert not any(name.endswith(".attn.bias") for name in vector)
        assert_gives_tuned(vector, pair)


def test_models_without_their_heads_give_a_vector_for_the_whole(models: TinyModels) -> None:
    pair = models.pair("gpt2")
    bodies = [AutoModelForCausalLM.from_pretrained(folder).transformer for folder in vars(pair).values()]
    assert_gives_tuned(TaskVector.from_finetuned(*bodies), pair)


def test_a_weight_under_two_names_is_refused(models: TinyModels, tmp_path: Path) -> None:
    pair = models.pair("gpt2")
    broken = shutil.copytree(pair.tuned, tmp_path / "twice")
    state = load_file(broken / WEIGHTS)
    save_file({**state, "ln_f.weight": state["transformer.ln_f.weight"] + 1}, broken / WEIGHTS)
    with pytest.raises(TaskVectorError, match=r"twice: .*transformer\.ln_f\.weight.*ln_f\.weight|ln_f\.weight.*twice"):
        TaskVector.from_finetuned(pair.base, broken)


# Dtypes, vocabularies, aliasing.


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.float16)], ids=str)
@pytest.mark.parametrize("live", [False, True])
def test_mixed_dtypes_give_the_exact_difference(
    dtypes: tuple[torch.dtype, torch.dtype], live: bool, tmp_path: Path
) -> None:
    base = make("phi", dtypes[0])
    tuned = tuned_copy(base).to(torch.float32)
    tuned = shake(tuned, 1e-4, seed=2).to(dtypes[1])
    pair = save_pair(tmp_path, base, tuned)
    vector = TaskVector.from_finetuned(base, tuned) if live else pair.vector()
    vector.save(tmp_path / "saved")
    for each in (vector, TaskVector.load(tmp_path / "saved")):
        for name, old in tensors(pair.base).items():
            new = tensors(pair.tuned)[name].read()
            assert torch.equal(each.dense(name, "float64"), new.double() - old.read().double())
            wide = old.read().to(torch.float32)  # the base in the fine-tune's precision: the fine-tune, exactly
            assert torch.equal(added(each, name, wide), new.float())
            assert added(each, name, old).dtype == dtypes[0]


def resized(model: Any, rows: int) -> Any:
    torch.manual_seed(5)
    model.resize_token_embeddings(rows, mean_resizing=False)
    return shake(model, 0.01, seed=7)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("live", [True, False])
@pytest.mark.parametrize("choice", ["truncate", "extend"])
@pytest.mark.parametrize("rows", [23, 17])
def test_resized_vocabularies_need_a_choice_and_keep_it(
    choice: str, rows: int, live: bool, tied: bool, tmp_path: Path
) -> None:
    base = make("llama", tie_word_embeddings=tied)
    tuned = resized(tuned_copy(base), rows)
    pair = save_pair(tmp_path, base, tuned)
    with pytest.raises(TaskVectorError, match=rf"weight: the vocabulary sizes differ, 20 .* {rows}.*Pass"):
        pair.vector()
    vector = TaskVector.from_finetuned(base, tuned, vocabulary=choice) if live else pair.vector(vocabulary=choice)
    vector.save(tmp_path / "v")
    for each in (vector, TaskVector.load(tmp_path / "v")):
        for name in {"model.embed_tokens.weight"} | ({"lm_head.weight"} if not tied else set()):
            old, new = tensors(pair.base)[name].read(), tensors(pair.tuned)[name].read()
            height = rows if choice == "extend" and rows > 20 else 20
            expected = torch.zeros(height, 16, dtype=torch.float64)
            expected[: min(rows, 20)] = new[:20].double() - old[:rows].double()
            if height > 20:
                expected[20:] = new[20:]
            assert torch.equal(each.dense(name, "float64"), expected)
    assert choice in vector.provenance.origins[0].how


def test_an_unknown_vocabulary_choice_is_refused(models: TinyModels) -> None:
    with pytest.raises(TaskVectorError, match="vocabulary='cut' is not one of 'truncate', 'extend'"):
        models.pair("llama").vector(vocabulary="cut")


def test_training_a_live_model_afterwards_changes_nothing(models: TinyModels) -> None:
    pair = models.pair("llama")
    base, tuned = (AutoModelForCausalLM.from_pretrained(f) for f in (pair.base, pair.tuned))
    both, mixed = TaskVector.from_finetuned(base, tuned), TaskVector.from_finetuned(pair.base, tuned)
    larger = resized(tuned_copy(tuned), 22)
    extended = TaskVector.from_finetuned(base, larger, vocabulary="extend")
    before = extended.dense("model.embed_tokens.weight")
    optimizer = torch.optim.SGD(tuned.parameters(), lr=10.0)
    tuned(input_ids=torch.tensor([[1, 2, 3]]), labels=torch.tensor([[1, 2, 3]])).loss.backward()
    optimizer.step()
    for model in (base, larger):
        shake(model, 1.0)
    for vector in (both, mixed):
        assert_gives_tuned(vector, pair)
    assert torch.equal(before, extended.dense("model.embed_tokens.weight"))


# Swapped arguments.


def note_origin(kind: str, folder: Path, base: Path) -> None:
    """Let a folder say that it was made from another, as a library or a user would."""
    config = json.loads((folder / "config.json").read_text())
    if kind == "training.json":
        record = {"base": {"name": "base", "fingerprint": open_checkpoint(base).sampled_fingerprint}}
        (folder / kind).write_text(json.dumps(record))
    elif kind == "config.json":
        (folder / kind).write_text(json.dumps({**config, "_name_or_path": str(base.resolve())}))
    else:
        (folder / "README.md").write_text("---\nbase_model:\n- me/base\n---\n# A fine-tune\n")


@pytest.mark.parametrize("kind", ["training.json", "config.json", "README.md"])
def test_a_base_that_says_it_is_the_fine_tune_gives_a_warning(
    kind: str, models: TinyModels, hub: HubServer, tmp_path: Path
) -> None:
    whole = models.pair("llama")
    pair = Pair(shutil.copytree(whole.base, tmp_path / "base"), shutil.copytree(whole.tuned, tmp_path / "tuned"))
    note_origin(kind, pair.tuned, pair.base)
    base: Path | str = pair.base
    tuned: Path | str = pair.tuned
    if kind == "README.md":
        for name, folder in (("me/base", pair.base), ("me/tuned", pair.tuned)):
            hub.add_repo(name, folder)
        base, tuned = "me/base", "me/tuned"
    with pytest.warns(TaskVectorWarning, match=rf"as its {kind} says.*τ = tuned − base.*give the base first") as given:
        swapped = TaskVector.from_finetuned(tuned, base)
    assert given[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        right = TaskVector.from_finetuned(base, tuned)
        if kind != "README.md":  # both say so: nothing is known
            note_origin(kind, pair.base, pair.tuned)
            TaskVector.from_finetuned(tuned, base)
    assert torch.equal(swapped.dense(swapped_name := next(iter(right))), -right.dense(swapped_name))


def test_names_alone_are_no_evidence_of_swapped_models(models: TinyModels, tmp_path: Path) -> None:
    whole = models.pair("llama")
    pair = Pair(shutil.copytree(whole.base, tmp_path / "base"), shutil.copytree(whole.tuned, tmp_path / "tuned"))
    config = json.loads((pair.tuned / "config.json").read_text())
    (pair.tuned / "config.json").write_text(json.dumps({**config, "_name_or_path": "/elsewhere/base"}))
    (pair.tuned / "README.md").write_text("---\nbase_model: base\n---\n")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        TaskVector.from_finetuned(pair.tuned, pair.base)


# Bad input: what, which parameter, what to do.


@pytest.fixture
def broken(models: TinyModels, tmp_path: Path) -> Callable[[Callable[[dict[str, torch.Tensor]], None]], Pair]:
    """A pair whose fine-tune's tensors were changed by a function."""
    pair = models.pair("phi")

    def change(edit: Callable[[dict[str, torch.Tensor]], None]) -> Pair:
        folder = shutil.copytree(pair.tuned, tmp_path / "broken")
        state = load_file(folder / WEIGHTS)
        edit(state)
        save_file(state, folder / WEIGHTS, {"format": "pt"})
        return Pair(pair.base, folder)

    return change


BIAS = "model.layers.1.mlp.fc1.bias"


def test_a_missing_parameter_is_refused_by_name(broken: Any) -> None:
    pair = broken(lambda state: state.pop(BIAS))
    for models in ((pair.base, pair.tuned), (pair.tuned, pair.base)):
        with pytest.raises(TaskVectorError, match=rf"broken is not a whole PhiForCausalLM: it lacks {BIAS} \(1 of"):
            TaskVector.from_finetuned(*models)


def test_a_parameter_of_one_model_alone_is_refused_by_name(broken: Any, tmp_path: Path) -> None:
    """Without a config nobody knows what a whole model has."""
    pair = broken(lambda state: state.pop(BIAS))
    whole, part = (shutil.copytree(folder, tmp_path / f"bare-{folder.name}") for folder in (pair.base, pair.tuned))
    for folder in (whole, part):
        (folder / "config.json").unlink()
    with pytest.raises(TaskVectorError, match=rf"missing in the fine-tune: {BIAS}.*Save the fine-tune again"):
        TaskVector.from_finetuned(whole, part)
    with pytest.raises(TaskVectorError, match=rf"missing in the base: {BIAS}"):
        TaskVector.from_finetuned(part, whole)


def test_an_unknown_parameter_is_refused_by_name(broken: Any) -> None:
    pair = broken(lambda state: state.update({"model.layers.1.mlp.gate.bias": torch.ones(3)}))
    with pytest.raises(
        TaskVectorError, match=r"broken: model\.layers\.1\.mlp\.gate\.bias is not among .*PhiForCausalLM"
    ):
        pair.vector()


def test_a_shape_that_the_config_does_not_give_is_refused_by_name(broken: Any) -> None:
    pair = broken(lambda state: state.update({BIAS: torch.ones(31)}))
    with pytest.raises(TaskVectorError, match=rf"{BIAS} has shape \[31\], but its config makes it \[32\].*save the"):
        pair.vector(vocabulary="truncate")


def test_another_size_is_refused_by_name(models: TinyModels) -> None:
    larger = models.pair("phi", intermediate_size=40)
    with pytest.raises(
        TaskVectorError, match=r"mlp\.fc1\.\S+: the base has shape \[32.*, the fine-tune \[40.*Give the base"
    ):
        TaskVector.from_finetuned(models.pair("phi").base, larger.tuned, vocabulary="truncate")


def test_another_architecture_is_refused(models: TinyModels) -> None:
    message = r"PhiForCausalLM.*OPTForCausalLM.*different architectures: 0 of \d+ parameter names.*Give the base"
    with pytest.raises(TaskVectorError, match=message):
        TaskVector.from_finetuned(models.pair("phi").base, models.pair("opt").tuned)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int64, torch.float8_e4m3fn, torch.bool], ids=str)
def test_integer_and_quantised_weights_are_refused(broken: Any, dtype: torch.dtype) -> None:
    pair = broken(lambda state: state.update({BIAS: torch.ones(32).to(dtype)}))
    told = rf"broken: {BIAS} is stored (as .*quantised.*use the model in bf16|in fewer bits, and {BIAS}_scale_inv)"
    with pytest.raises(TaskVectorError, match=told):
        pair.vector()


def test_a_quantised_checkpoint_is_called_so(models: TinyModels, tmp_path: Path) -> None:
    """bitsandbytes stores packed weights and, beside them, tensors that no architecture has."""
    pair = models.pair("phi")
    folder = shutil.copytree(pair.tuned, tmp_path / "four-bit")
    state = load_file(folder / WEIGHTS)
    name = "model.layers.0.mlp.fc1.weight"
    state[name] = torch.zeros(256, 1, dtype=torch.uint8)
    state[f"{name}.absmax"] = torch.ones(8)
    save_file(state, folder / WEIGHTS)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(TaskVectorError, match=r"four-bit is quantised by 'bitsandbytes', .* not read here.*bf16"):
        TaskVector.from_finetuned(pair.base, folder)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_in_a_checkpoint_is_refused_by_name(broken: Any, bad: float, tmp_path: Path) -> None:
    pair = broken(lambda state: state[BIAS].fill_(bad))
    vector = pair.vector()  # lazy: found when the tensor is used
    message = rf"{BIAS}.*NaN or infinite.*Check the checkpoints"
    for use in (lambda: vector.dense(BIAS), vector.norm, lambda: vector.save(tmp_path / "v")):
        with pytest.raises(TaskVectorError, match=message):
            use()
    with pytest.raises(TaskVectorError, match=message):
        added(vector, BIAS, tensors(pair.base)[BIAS])
    assert not (tmp_path / "v").exists()
    with pytest.raises(TaskVectorError, match=message):
        TaskVector.from_finetuned(pair.base, AutoModelForCausalLM.from_pretrained(pair.tuned))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("live", [False, True])
def test_an_identical_fine_tune_is_refused(models: TinyModels, tmp_path: Path, dtype: torch.dtype, live: bool) -> None:
    pair = models.pair("phi")
    copy = AutoModelForCausalLM.from_pretrained(pair.base, dtype=dtype)
    copy.save_pretrained(tmp_path / "copy")
    with pytest.raises(TaskVectorError, match=r"identical to its base.*Was the right checkpoint given"):
        TaskVector.from_finetuned(pair.base, copy if live else tmp_path / "copy")


def test_one_changed_element_is_not_identical(models: TinyModels, tmp_path: Path) -> None:
    base = models.pair("phi").base
    folder = shutil.copytree(base, tmp_path / "almost")
    state = load_file(folder / WEIGHTS)
    state[BIAS][17] += 1.0
    save_file(state, folder / WEIGHTS)
    assert TaskVector.from_finetuned(base, folder).norm() == pytest.approx(1.0, rel=1e-6)


def test_truncated_and_corrupt_files_are_refused(models: TinyModels, tmp_path: Path) -> None:
    pair = models.pair("phi")
    whole = (pair.tuned / WEIGHTS).read_bytes()
    damages = [whole[:-1], whole[:100], b"", whole[:4], b"\xff" * 8 + whole[8:], whole[:20] + b"\x00" + whole[21:]]
    folder = shutil.copytree(pair.tuned, tmp_path / "damaged")
    for damage in [*damages, whole + b"\0"]:
        (folder / WEIGHTS).unlink()
        (folder / WEIGHTS).write_bytes(damage)
        with pytest.raises(TaskVectorError, match=r"model\.safetensors is damaged.*Download or save it again"):
            TaskVector.from_finetuned(pair.base, folder)


def test_a_folder_without_weights_is_refused(models: TinyModels, tmp_path: Path) -> None:
    with pytest.raises(TaskVectorError, match=r"has none of model\.safetensors.*Is it a model folder"):
        TaskVector.from_finetuned(tmp_path, models.pair("phi").tuned)


def sharded(models: TinyModels, folder: Path) -> tuple[Path, dict[str, Any]]:
    AutoModelForCausalLM.from_pretrained(models.pair("phi").tuned).save_pretrained(folder, max_shard_size="5KB")
    return folder / f"{WEIGHTS}.index.json", json.loads((folder / f"{WEIGHTS}.index.json").read_text())


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "a/b.safetensors", "..", ".", ""])
def test_an_index_that_points_outside_its_folder_is_refused(models: TinyModels, tmp_path: Path, name: str) -> None:
    (tmp_path / "secret.safetensors").write_bytes((models.pair("phi").tuned / WEIGHTS).read_bytes())
    index, content = sharded(models, tmp_path / "model")
    content["weight_map"][BIAS] = name
    index.write_text(json.dumps(content))
    with pytest.raises(TaskVectorError, match=r"index\.json names a shard outside its folder.*Do not trust"):
        TaskVector.from_finetuned(models.pair("phi").base, index.parent)


def test_an_index_that_disagrees_with_its_shards_is_refused(models: TinyModels, tmp_path: Path) -> None:
    index, content = sharded(models, tmp_path / "model")
    weights = content["weight_map"]
    other = next(file for file in weights.values() if file != weights[BIAS])
    edits: list[tuple[dict[str, Any], str]] = [
        ({**weights, BIAS: "missing.safetensors"}, r"names missing\.safetensors, which is missing.*Download"),
        ({**weights, BIAS: "a" * 300}, r"names a+, which is missing"),
        ({**weights, BIAS: other}, rf"disagree: {BIAS} is (only|not) in"),
        ({**weights, "more.weight": other}, rf"disagree: more\.weight is not in {other}"),
        ({n: f for n, f in weights.items() if n != BIAS}, rf"disagree: {BIAS} is only in"),
    ]
    for weight_map, message in edits:
        index.write_text(json.dumps({**content, "weight_map": weight_map}))
        with pytest.raises(TaskVectorError, match=message):
            TaskVector.from_finetuned(models.pair("phi").base, index.parent)
    for text in (
        "{",
        "[]",
        "{}",
        '{"weight_map": {}}',
        '{"weight_map": []}',
        '{"weight_map": {"a": 1}}',
        "[" * 100_000,
    ):
        index.write_text(text)
        with pytest.raises(TaskVectorError, match=r"index\.json"):
            TaskVector.from_finetuned(models.pair("phi").base, index.parent)


class _Run:
    """Unpickling this would leave a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_a_pickle_with_code_in_it_is_not_run(models: TinyModels, tmp_path: Path) -> None:
    pair, trace = models.pair("phi"), tmp_path / "was-run"
    folder = as_bin(pair.tuned, tmp_path / "evil")
    torch.save({BIAS: torch.ones(2), "code": _Run(trace)}, folder / "pytorch_model.bin")
    message = r"pytorch_model\.bin holds more than tensors, and loading it could run code.*safetensors"
    with pytest.raises(TaskVectorError, match=message):
        TaskVector.from_finetuned(pair.base, folder)
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"code": _Run(trace)}))
    with pytest.raises(TaskVectorError, match=r"pytorch_model\.bin"):
        TaskVector.from_finetuned(pair.base, folder)
    assert not trace.exists()
    _Run(trace).__reduce__()[0](trace)
    assert trace.exists()  # so it would have been seen


def test_a_bin_file_that_is_no_state_dict_is_refused(models: TinyModels, tmp_path: Path) -> None:
    pair = models.pair("phi")
    folder = as_bin(pair.tuned, tmp_path / "odd")
    for content in ([torch.ones(2)], {"a": 1}, {"model": {"a": torch.ones(2)}}, {3: torch.ones(2)}, {"a": None}):
        torch.save(content, folder / "pytorch_model.bin")
        with pytest.raises(TaskVectorError, match=r"pytorch_model\.bin is not a state dict"):
            TaskVector.from_finetuned(pair.base, folder)
    whole = (folder / "pytorch_model.bin").read_bytes()
    for damage in (b"", whole[: len(whole) // 2], b"\0" * 100, whole[:-10]):
        (folder / "pytorch_model.bin").write_bytes(damage)
        with pytest.raises(TaskVectorError, match=r"pytorch_model\.bin"):
            TaskVector.from_finetuned(pair.base, folder)


def test_a_sparse_tensor_in_a_bin_file_is_refused_by_name(models: TinyModels, tmp_path: Path) -> None:
    pair = models.pair("phi")
    folder = as_bin(pair.tuned, tmp_path / "sparse")
    state = torch.load(folder / "pytorch_model.bin")
    state[BIAS] = state[BIAS].to_sparse()
    torch.save(state, folder / "pytorch_model.bin")
    with pytest.raises(TaskVectorError, match=BIAS):
        TaskVector.from_finetuned(pair.base, folder)


def test_strided_tensors_in_a_bin_file_give_the_same_vector(models: TinyModels, tmp_path: Path) -> None:
    pair = models.pair("phi")
    folder = as_bin(pair.tuned, tmp_path / "strided")
    state = torch.load(folder / "pytorch_model.bin")
    torch.save({n: t.T.contiguous().T if t.ndim == 2 else t for n, t in state.items()}, folder / "pytorch_model.bin")
    vector = TaskVector.from_finetuned(pair.base, folder)
    assert_gives_tuned(vector, pair)
    vector.save(tmp_path / "v")
    assert_gives_tuned(TaskVector.load(tmp_path / "v"), pair)


@pytest.mark.parametrize(
    "edit",
    [
        {"model_type": ["phi"]},
        {"model_type": 3},
        {"num_attention_heads": 0},
        {"hidden_size": -4},
        {"hidden_size": "many"},
        {"num_hidden_layers": None},
        {"vocab_size": 1e300},
        {"dtype": "nothing"},
        {"hidden_act": "nothing"},
        {"rope_parameters": 7},
    ],
    ids=str,
)
def test_a_config_that_makes_no_sense_is_refused(models: TinyModels, tmp_path: Path, edit: dict[str, Any]) -> None:
    pair = models.pair("phi")
    folder = shutil.copytree(pair.tuned, tmp_path / "odd")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **edit}))
    try:
        vector = TaskVector.from_finetuned(pair.base, folder)
    except TaskVectorError as error:
        assert "odd" in str(error) or "config" in str(error)
    else:
        assert_gives_tuned(vector, pair)


def test_names_of_an_unknown_architecture_are_taken_as_they_are(models: TinyModels, tmp_path: Path) -> None:
    """Names are taken as they are, on both sides."""
    pair = models.pair("phi")
    for side in ("base", "tuned"):
        folder = shutil.copytree(pair.base.parent / side, tmp_path / side)
        (folder / "config.json").write_text(json.dumps({"model_type": "not-yet-invented"}))
    odd = Pair(tmp_path / "base", tmp_path / "tuned")
    assert_gives_tuned(odd.vector(), pair)


def test_a_config_that_names_no_class_is_refused(tmp_path: Path, models: TinyModels) -> None:
    folder = shutil.copytree(models.pair("phi").tuned, tmp_path / "vit")
    (folder / "config.json").write_text(json.dumps({"model_type": "vit"}))
    with pytest.raises(TaskVectorError, match="type vit may be that of several classes"):
        TaskVector.from_finetuned(models.pair("phi").base, folder)


def test_an_adapter_is_refused_naming_from_adapter(models: TinyModels, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(TaskVectorError, match=r"is a PEFT adapter.*from_adapter"):
        TaskVector.from_finetuned(models.pair("phi").base, tmp_path)


@pytest.mark.parametrize("model", [None, 3, {"w": torch.ones(2)}])
def test_what_is_no_model_is_refused(models: TinyModels, model: object) -> None:
    with pytest.raises(TaskVectorError, match="expected a Hub id, a folder or a live model, not"):
        TaskVector.from_finetuned(models.pair("phi").base, model)  # type: ignore[arg-type]


def test_a_head_that_differs_though_the_config_ties_it_is_refused(models: TinyModels, tmp_path: Path) -> None:
    pair = models.pair("gpt2")
    folder = shutil.copytree(pair.tuned, tmp_path / "untied")
    state = load_file(folder / WEIGHTS)
    head = state["transformer.wte.weight"].clone()
    save_file({**state, "lm_head.weight": head}, folder / WEIGHTS)  # a copy of the same weight is no contradiction
    assert_gives_tuned(TaskVector.from_finetuned(pair.base, folder), pair)
    save_file({**state, "lm_head.weight": head + 1}, folder / WEIGHTS)
    message = r"lm_head\.weight differs from transformer\.wte\.weight.*tie_word_embeddings=False"
    with pytest.raises(TaskVectorError, match=message):
        TaskVector.from_finetuned(pair.base, folder)


# Foreign files have no checksums, but a structure that must be right.


def test_a_checkpoint_of_mutated_structure_never_crashes(models: TinyModels, tmp_path: Path) -> None:
    mutate_structure(models, tmp_path, 600)


@pytest.mark.slow
def test_a_checkpoint_of_mutated_structure_never_crashes_in_thousands_of_tries(
    models: TinyModels, tmp_path: Path
) -> None:
    mutate_structure(models, tmp_path, 4000)


def mutate_structure(models: TinyModels, tmp_path: Path, count: int) -> None:
    from support.corruption import Corruptor

    pair = models.pair("opt")
    index, _ = sharded_copy(pair.tuned, tmp_path / "model")
    shard = sorted(index.parent.glob("*.safetensors"))[0]
    with safe_open(shard, "pt") as file:
        names = set(file.keys())
    header = 8 + struct.unpack("<Q", shard.read_bytes()[:8])[0]
    right = {name: source.read() for name, source in tensors(pair.tuned).items()}
    corruptor, refused = Corruptor(seed=0), 0
    for number in range(count):
        target, only = [(shard, header), (index, None)][number % 2]
        with corruptor.corrupted(target, only):
            try:
                vector = TaskVector.from_finetuned(pair.base, index.parent)
                found = {name: change.terms[0].delta.sources[1].read() for name, change in vector.items()}
            except TaskVectorError:
                refused += 1
                continue
        assert set(found) == set(right)
        for name, tensor in found.items():
            assert tensor.shape == right[name].shape and tensor.dtype in (*DTYPES, torch.float64)
            if target is not shard or name not in names:
                assert torch.equal(tensor, right[name])
    assert refused > count / 4


def sharded_copy(model: Path, to: Path) -> tuple[Path, dict[str, Any]]:
    AutoModelForCausalLM.from_pretrained(model).save_pretrained(to, max_shard_size="12KB")
    index = to / f"{WEIGHTS}.index.json"
    return index, json.loads(index.read_text())


def test_a_checkpoint_in_memory_is_found_by_canonical_names() -> None:
    from hf_taskvec.models.live_model import live_checkpoint

    model = make("gpt_neox")
    checkpoint = live_checkpoint(model)
    assert "embed_out.weight" in checkpoint.tensors and "lm_head.weight" not in checkpoint.tensors
    assert isinstance(checkpoint.tensors["embed_out.weight"], InMemory)


# Live models that are not simply in memory.


def test_offloaded_weights_are_read_from_where_they_are(models: TinyModels, tmp_path: Path) -> None:
    from accelerate import disk_offload

    pair = models.pair("llama")
    base, tuned = (AutoModelForCausalLM.from_pretrained(folder) for folder in (pair.base, pair.tuned))
    disk_offload(tuned, tmp_path / "offloaded", execution_device="cpu")
    assert any(parameter.is_meta for parameter in tuned.parameters())
    assert_gives_tuned(TaskVector.from_finetuned(base, tuned), pair)


def test_weights_sharded_over_processes_are_gathered(models: TinyModels) -> None:
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    pair = models.pair("llama")
    distributed.init_process_group("gloo", rank=0, world_size=1, store=distributed.HashStore())
    try:
        tuned = AutoModelForCausalLM.from_pretrained(pair.tuned)
        fully_shard(tuned, mesh=init_device_mesh("cpu", (1,)))
        assert_gives_tuned(TaskVector.from_finetuned(pair.base, tuned), pair)
    finally:
        distributed.destroy_process_group()


def test_quantised_live_weights_are_refused_by_name(models: TinyModels) -> None:
    pair = models.pair("llama")
    tuned = AutoModelForCausalLM.from_pretrained(pair.tuned)
    layer = tuned.model.layers[0].mlp.up_proj
    layer.weight = torch.nn.Parameter(layer.weight.data.to(torch.int8), requires_grad=False)
    message = r"live LlamaForCausalLM: model\.layers\.0\.mlp\.up_proj\.weight is stored as torch\.int8.*quantised"
    with pytest.raises(TaskVectorError, match=message):
        TaskVector.from_finetuned(pair.base, tuned)


def test_names_of_a_model_without_a_config_are_taken_as_they_are(tmp_path: Path) -> None:
    """Without a config names are taken as they are."""
    torch.manual_seed(0)
    base = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4))
    tuned = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4))
    vector = TaskVector.from_finetuned(base, tuned)
    assert set(vector) == {"0.weight", "0.bias"}  # the norms are equal
    assert torch.equal(added(vector, "0.weight", base[0].weight.detach()), tuned[0].weight)


def test_a_vector_is_refused_as_a_model(models: TinyModels, tmp_path: Path) -> None:
    pair = models.pair("phi")
    pair.vector().save(tmp_path / "saved")
    with pytest.raises(MismatchError, match=r"saved is a saved task vector, not a model: use TaskVector.load\(\)"):
        TaskVector.from_finetuned(tmp_path / "saved", pair.tuned)


# Heads that differ.


def _classifiers(tmp_path: Path) -> tuple[Path, Path]:
    """A base with a head of two labels and a fine-tune of it with one of three."""
    tiny = CLASSES["BertForSequenceClassification"]
    base, other = tiny.make(num_labels=2), tiny.make(num_labels=3)
    other.bert.load_state_dict(tuned_copy(base).bert.state_dict())
    pair = save_pair(tmp_path, base, other)
    return pair.base, pair.tuned


def test_heads_of_other_sizes_take_a_choice(tmp_path: Path) -> None:
    base, tuned = _classifiers(tmp_path)
    with pytest.raises(MismatchError, match=r"classifier\.\S+: the heads differ, \[2.* in the base .*heads='exclude'"):
        TaskVector.from_finetuned(base, tuned)
    with pytest.raises(BadValueError, match=r"heads='drop' is not one of 'exclude', 'match'"):
        TaskVector.from_finetuned(base, tuned, heads="drop")  # type: ignore[arg-type]
    body = {name for name in load_file(base / "model.safetensors") if name.startswith("bert.")}
    for heads in ("exclude", "match"):
        vector = TaskVector.from_finetuned(base, tuned, heads=heads)
        assert set(vector) == body
        found = load_file(vector.apply(base, tmp_path / heads) / "model.safetensors")
        first, second = (load_file(each / "model.safetensors") for each in (base, tuned))
        for name, tensor in found.items():
            assert torch.equal(tensor, second[name] if name in body else first[name]), name
        vector.apply(base, tmp_path / f"strict {heads}", strict_base=True)  # the record is of the whole base


def test_heads_that_fit_are_compared_where_that_is_asked_for(tmp_path: Path) -> None:
    base = CLASSES["BertForSequenceClassification"].make()
    pair = save_pair(tmp_path, base, tuned_copy(base))
    assert set(pair.vector(heads="match")) == set(pair.vector())
    left = set(pair.vector()) - set(pair.vector(heads="exclude"))
    assert left == {"classifier.weight", "classifier.bias"}


def test_a_classifier_is_compared_with_the_language_model_that_it_comes_from(tmp_path: Path) -> None:
    language, classifier = CLASSES["BertForMaskedLM"].make(), CLASSES["BertForSequenceClassification"].make()
    shared = {name: each + 0.5 for name, each in language.bert.state_dict().items()}
    classifier.bert.load_state_dict(shared, strict=False)
    pair = save_pair(tmp_path, language, classifier)
    with pytest.raises(MismatchError, match=r"different heads \(missing in .*cls.*pooler.*heads='match'"):
        pair.vector()
    for vector in (pair.vector(heads="match"), TaskVector.from_finetuned(language, classifier, heads="exclude")):
        assert set(vector) == {f"bert.{name}" for name in shared if name != "embeddings.position_ids"}
        with vector.applied_to(language):
            assert all(torch.equal(each, shared[name]) for name, each in language.bert.state_dict().items())


def test_a_head_of_another_task_is_refused_with_the_choice_that_leaves_it_out(tmp_path: Path) -> None:
    tiny = CLASSES["BertForSequenceClassification"]
    base = tiny.make()
    vector = TaskVector.from_finetuned(base, tuned_copy(base))
    with pytest.raises(MismatchError, match=r"classifier\.\S+: the heads differ, .*heads='exclude'"):
        vector.edit(tiny.make(num_labels=4))
    with pytest.raises(MismatchError, match=r"missing: \S+pooler.*classifier.*heads='exclude'"):
        vector.edit(CLASSES["BertForQuestionAnswering"].make())
    TaskVector.from_finetuned(base, tuned_copy(base), heads="exclude").edit(tiny.make(num_labels=4)).restore()
