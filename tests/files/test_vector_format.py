"""A vector's own files: lossless, mapped, atomic, and never silently wrong."""

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.corruption import Corruptor, replace
from support.hub_server import HubServer
from support.kinds_of_change import KINDS
from support.tiny_models import TinyModels, assert_gives_tuned, make, shake, tensors
from transformers import AutoModelForCausalLM

from hf_taskvec import TaskVector, TaskVectorError, __version__
from hf_taskvec.algebra.deltas import Difference, LowRank
from hf_taskvec.algebra.digests import tensor_digest
from hf_taskvec.algebra.provenance import Origin, Provenance
from hf_taskvec.algebra.sources import InMemory
from hf_taskvec.algebra.sums import Term
from hf_taskvec.files.save_vector import rounding_errors

JSON, TENSORS = "taskvec.json", "taskvec.safetensors"


def mixture() -> TaskVector:
    """A change of every kind, one parameter each, and all of them on one parameter."""
    made = {kind: make(torch.Generator().manual_seed(n))[0] for n, (kind, make) in enumerate(KINDS.items())}
    terms = {kind: [Term(0.1 * (n + 1), delta)] for n, (kind, delta) in enumerate(made.items())}
    terms["all"] = [Term(-1 / 3, delta) for delta in made.values()]
    return TaskVector(terms, Provenance.of(Origin("v", "made for a test"))) * -0.7


def values(vector: TaskVector) -> dict[str, torch.Tensor]:
    return {name: vector.dense(name, "float64") for name in vector}


def assert_same(one: TaskVector, other: TaskVector) -> None:
    """The same numbers, but for the last bits of an fp64 sum whose terms come in another form."""
    assert list(one) == list(other)
    for name, value in values(one).items():
        torch.testing.assert_close(other.dense(name, "float64"), value, rtol=1e-14, atol=1e-15)


# What is kept.


def test_every_kind_of_change_is_saved_and_loaded(tmp_path: Path) -> None:
    vector = mixture()
    assert vector.save(tmp_path / "v") == tmp_path / "v"
    loaded = TaskVector.load(tmp_path / "v")
    assert_same(vector, loaded)
    assert_same(-2 * vector, -2 * loaded)
    assert loaded.expression == vector.expression == "-0.7*v"
    assert loaded.provenance == vector.provenance
    kinds = {name: [type(t.delta).__name__ for t in loaded[name].terms] for name in loaded}
    assert kinds["low rank"] == kinds["transposed low rank"] == ["LowRank"]
    assert kinds["DoRA of Linear"] == ["DoRA"]
    assert kinds["scattered rows"] == ["Rows"]
    assert kinds["difference"] == kinds["high and low"] == kinds["high and sparse low"] == ["Dense"]
    loaded.save(tmp_path / "again")
    again = TaskVector.load(tmp_path / "again")
    assert all(torch.equal(value, again.dense(name, "float64")) for name, value in values(loaded).items())


def test_dense_changes_are_stored_to_the_last_bit(tmp_path: Path) -> None:
    for kind in ("dense", "high and low", "high and sparse low", "difference", "scattered rows", "a range of rows"):
        delta, _ = KINDS[kind](torch.Generator().manual_seed(0))
        vector = TaskVector({"w": [Term(1.0, delta)]})
        vector.save(tmp_path / kind)
        assert torch.equal(TaskVector.load(tmp_path / kind).dense("w", "float64"), vector.dense("w", "float64"))


def test_factors_are_stored_as_they_are(tmp_path: Path) -> None:
    left, right = torch.randn(6, 2).bfloat16(), torch.randn(2, 4).half()
    (0.3 * TaskVector.from_tensors({"w": (left, right)})).save(tmp_path / "v")
    stored = load_file(tmp_path / "v" / TENSORS)
    assert {str(tensor.dtype) for tensor in stored.values()} == {"torch.bfloat16", "torch.float16"}
    assert any(torch.equal(left, each) for each in stored.values() if each.dtype == left.dtype)
    (term,) = TaskVector.load(tmp_path / "v")["w"].terms
    assert term.weight == 0.3 and isinstance(term.delta, LowRank)


def test_a_shared_tensor_is_stored_once(tmp_path: Path) -> None:
    right = InMemory(torch.randn(2, 4))
    terms = [Term(1.0, LowRank(InMemory(torch.randn(6, 2)), right)) for _ in range(2)]
    TaskVector({"w": terms}).save(tmp_path / "v")
    assert len(load_file(tmp_path / "v" / TENSORS)) == 3


def test_the_json_can_be_read_by_a_person(tmp_path: Path) -> None:
    vector = 0.5 * TaskVector.from_tensors({"w": torch.ones(2, 3), "λ": torch.ones(1)}, name="hp1")
    vector.save(tmp_path / "v")
    text = (tmp_path / "v" / JSON).read_text("utf-8")
    document = json.loads(text)
    assert document["format"] == 4 and document["library"] == __version__
    assert document["provenance"]["expression"] == "0.5*hp1"
    assert "λ" in text and text.count("\n") > 20
    (term,) = document["parameters"]["w"]
    assert term["weight"] == 0.5 and term["kind"] == "dense"
    assert document["tensors"][term["parts"][0]]["shape"] == [2, 3]


def test_differences_take_the_fewest_bytes(models: TinyModels, tmp_path: Path) -> None:
    pair = models.pair("phi", torch.bfloat16)
    pair.vector().save(tmp_path / "v")
    size = (tmp_path / "v" / TENSORS).stat().st_size
    assert size < 2.2 * (pair.tuned / "model.safetensors").stat().st_size


def test_discarded_energy_is_kept(tmp_path: Path) -> None:
    vector = TaskVector.from_tensors({"w": torch.randn(8, 8), "b": torch.randn(8)}).compress(rank=2)
    vector.save(tmp_path / "v")
    loaded = TaskVector.load(tmp_path / "v")
    assert loaded.discarded == vector.discarded and 0 < loaded.discarded["w"] < 1
    assert_same(vector, loaded)


def test_an_empty_vector_is_saved_and_unchanged_parameters_are_not(tmp_path: Path) -> None:
    v = TaskVector.from_tensors({"w": torch.ones(2)})
    (v - v).save(tmp_path / "empty")
    assert len(TaskVector.load(tmp_path / "empty")) == 0
    same = torch.ones(2)
    zero = TaskVector({"w": [Term(1.0, Difference(InMemory(same), InMemory(same.clone())))], "b": v["w"].terms})
    zero.save(tmp_path / "zero")
    assert set(TaskVector.load(tmp_path / "zero")) == {"b"}


def test_scalars_and_odd_names_are_saved_and_loaded(tmp_path: Path) -> None:
    names = ["scalar", "a:0.part0", "with space/and slash", "λ", "__metadata"]
    vector = TaskVector.from_tensors({name: torch.tensor(float(n)) + 1 for n, name in enumerate(names)})
    vector.save(tmp_path / "v")
    assert_same(vector, TaskVector.load(tmp_path / "v"))
    lossy = vector / 3 + TaskVector.from_tensors({"a:0.part0": torch.tensor(0.1)})
    assert lossy.save(tmp_path / "lossy", dtype="bfloat16") == tmp_path / "lossy"
    assert set(rounding_errors(lossy, "bfloat16")) == {"a:0.part0"}


# Lossy, when asked.


@pytest.mark.parametrize(("dtype", "unit"), [("bfloat16", 2**-8), ("float16", 2**-11)])
def test_a_lossy_dtype_reports_its_error(dtype: str, unit: float, tmp_path: Path) -> None:
    vector = TaskVector.from_tensors(
        {"w": torch.randn(20, 20), "exact": torch.ones(3), "low": (torch.randn(9, 2), torch.randn(2, 9))}
    )
    vector.save(tmp_path / "v", dtype=dtype)
    errors = rounding_errors(vector, dtype)
    assert rounding_errors(vector, "float32") == {}
    loaded = TaskVector.load(tmp_path / "v")
    assert set(errors) == {"w"}  # what is exact is not reported, and factors are not touched
    lost = (loaded.dense("w", "float64") - vector.dense("w", "float64")).norm() / vector.norm("w")
    assert errors["w"] == pytest.approx(lost.item(), rel=1e-9)
    assert 0 < errors["w"] < unit
    for name in ("exact", "low"):
        assert torch.equal(loaded.dense(name, "float64"), vector.dense(name, "float64"))


def test_lossy_overflow_is_refused_by_name(tmp_path: Path) -> None:
    vector = TaskVector.from_tensors({"fc.weight": torch.tensor([1e6])})
    with pytest.raises(TaskVectorError, match=r"fc\.weight.*too large for float16"):
        vector.save(tmp_path / "v", dtype="float16")
    assert not (tmp_path / "v").exists()


def test_bad_options_are_refused_and_write_nothing(tmp_path: Path) -> None:
    vector = TaskVector.from_tensors({"w": torch.ones(2)})
    with pytest.raises(TaskVectorError, match="int8"):
        vector.save(tmp_path / "v", dtype="int8")
    with pytest.raises(TaskVectorError, match="takes no dtype"):
        vector.save(tmp_path / "v", dtype="bfloat16", reference=True)
    for size in ("many", "5XB", 0, "0GB", -1, 1e9, None):
        with pytest.raises(TaskVectorError, match="is not a size"):
            vector.save(tmp_path / "v", max_shard_size=size)
    assert list(tmp_path.iterdir()) == []
    vector.save(tmp_path / "v", max_shard_size=np.int64(10**9))
    with pytest.raises(TaskVectorError, match="a folder or a Hub id, not from None"):
        TaskVector.load(None)  # type: ignore[arg-type]


# References.


def test_a_reference_to_folders_gives_the_vector_back(models: TinyModels, tmp_path: Path) -> None:
    pair = models.pair("phi", torch.bfloat16)
    (0.5 * pair.vector()).save(tmp_path / "v", reference=True)
    assert [path.name for path in (tmp_path / "v").iterdir()] == [JSON]
    loaded = TaskVector.load(tmp_path / "v")
    assert_gives_tuned(2 * loaded, pair)
    assert len(loaded - 0.5 * pair.vector()) == len(loaded)  # other terms, the same numbers
    assert (loaded - 0.5 * pair.vector()).norm() == 0.0
    loaded.save(tmp_path / "again", reference=True)
    assert_gives_tuned(2 * TaskVector.load(tmp_path / "again"), pair)
    loaded.save(tmp_path / "whole")
    assert_gives_tuned(2 * TaskVector.load(tmp_path / "whole"), pair)


def test_a_reference_to_hub_ids_stays_at_its_commit(models: TinyModels, hub: HubServer, tmp_path: Path) -> None:
    pair = models.pair("phi")
    for name in ("base", "tuned"):
        hub.add_repo(f"me/{name}", pair.base.parent / name)
    TaskVector.from_finetuned("me/base", "me/tuned").save(tmp_path / "v", reference=True)
    text = (tmp_path / "v" / JSON).read_text()
    assert '"me/base"' in text and str(hub.home) not in text
    hub.add_repo("me/tuned", models.pair("llama").tuned)  # a later commit does not matter
    assert_gives_tuned(TaskVector.load(tmp_path / "v"), pair)


def test_adapters_and_resized_vocabularies_can_be_referred_to(models: TinyModels, tmp_path: Path) -> None:
    from support.tiny_adapters import adapter

    base = models.pair("phi").base
    options = {"target_modules": ["q_proj"], "use_dora": True, "trainable_token_indices": [3, 1]}
    vector = adapter(base, tmp_path / "adapter", **options).vector(base=base)
    vector.save(tmp_path / "v", reference=True)
    assert_same(vector, TaskVector.load(tmp_path / "v"))
    larger = make("phi")
    larger.resize_token_embeddings(23, mean_resizing=False)
    shake(larger).save_pretrained(tmp_path / "larger")
    for choice in ("truncate", "extend"):
        vector = TaskVector.from_finetuned(base, tmp_path / "larger", vocabulary=choice)
        vector.save(tmp_path / choice, reference=True)
        assert_same(vector, TaskVector.load(tmp_path / choice))


@pytest.mark.parametrize("where", [0, 2000, -1])
def test_a_base_that_changed_since_is_noticed(models: TinyModels, tmp_path: Path, where: int) -> None:
    """At the start of a tensor when loading; in the middle of a large one when it is used."""
    large, folder = torch.randn(300, 100), tmp_path / "models"
    for name in ("base", "tuned"):
        (folder / name).mkdir(parents=True)
        save_file({"w": large + (name == "tuned")}, folder / name / "model.safetensors")
    TaskVector.from_finetuned(folder / "base", folder / "tuned").save(tmp_path / "v", reference=True)
    assert TaskVector.load(tmp_path / "v").norm() == pytest.approx(math.sqrt(30000), rel=1e-5)
    large.view(-1)[where] += 1
    (folder / "base" / "model.safetensors").unlink()
    save_file({"w": large}, folder / "base" / "model.safetensors")
    with pytest.raises(TaskVectorError, match=r"w in model\.safetensors is not what it was.*changed since.*revision"):
        loaded = TaskVector.load(tmp_path / "v")
        assert where == 2000  # else the samples told it at once
        loaded.dense("w")
    TaskVector.load(tmp_path / "v", verify=False).dense("w")
    save_file({"w": large[:10].clone()}, folder / "base" / "model.safetensors")
    with pytest.raises(TaskVectorError, match="not what it was"):
        TaskVector.load(tmp_path / "v")
    save_file({"other": large}, folder / "base" / "model.safetensors")
    with pytest.raises(TaskVectorError, match="base no longer has w: it changed"):
        TaskVector.load(tmp_path / "v")
    shutil.rmtree(folder / "base")
    with pytest.raises(TaskVectorError, match="no folder 'base'"):
        TaskVector.load(tmp_path / "v")


def test_what_has_no_file_cannot_be_referred_to(models: TinyModels, tmp_path: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(models.pair("phi").base)
    vector = TaskVector.from_finetuned(base, models.pair("phi").tuned)
    with pytest.raises(TaskVectorError, match=r"weight comes from a live model.*without reference=True"):
        vector.save(tmp_path / "v", reference=True)
    assert not (tmp_path / "v").exists()


def test_a_saved_vector_cannot_be_referred_to(models: TinyModels, tmp_path: Path) -> None:
    models.pair("phi").vector().save(tmp_path / "one")
    for verify in (True, False):
        with pytest.raises(TaskVectorError, match=r"\w comes from a saved task vector.*without reference=True"):
            TaskVector.load(tmp_path / "one", verify=verify).save(tmp_path / "two", reference=True)
    assert not (tmp_path / "two").exists()


def test_a_loaded_reference_can_be_saved_as_one(models: TinyModels, hub: HubServer, tmp_path: Path) -> None:
    hub.add_repo("me/base", models.pair("phi").base)
    vector = TaskVector.from_finetuned("me/base", models.pair("phi").tuned)
    vector.save(tmp_path / "one", reference=True)
    TaskVector.load(tmp_path / "one").save(tmp_path / "two", reference=True)
    one, two = (json.loads((tmp_path / folder / JSON).read_text()) for folder in ("one", "two"))
    assert one["checkpoints"] == two["checkpoints"]
    assert_same(TaskVector.load(tmp_path / "two"), vector)


# Writing.


def test_no_shard_is_larger_than_asked(tmp_path: Path) -> None:
    vector = TaskVector.from_tensors({f"w{n}": torch.randn(50, 10) for n in range(5)} | {"large": torch.randn(3000)})
    vector.save(tmp_path / "v", max_shard_size="4KB")
    files = sorted(path.name for path in (tmp_path / "v").glob("*.safetensors"))
    assert files == [f"taskvec-{k:05}-of-00004.safetensors" for k in range(1, 5)]
    for file in files:
        with safe_open(tmp_path / "v" / file, "pt") as opened:
            assert len(list(opened.keys())) <= 2
    assert_same(vector, TaskVector.load(tmp_path / "v"))


def test_a_folder_is_replaced_only_when_it_is_ours(tmp_path: Path) -> None:
    one, two = (TaskVector.from_tensors({"w": torch.full((2,), float(n))}) for n in (1, 2))
    one.save(tmp_path / "v")
    with pytest.raises(TaskVectorError, match=r"already holds an output\. Pass overwrite=True"):
        two.save(tmp_path / "v")
    assert_same(one, TaskVector.load(tmp_path / "v"))
    two.save(tmp_path / "v", overwrite=True)
    loaded = TaskVector.load(tmp_path / "v")
    assert_same(two, loaded)
    (3 * loaded).save(tmp_path / "v", overwrite=True)  # over the files that it reads
    assert_same(3 * two, TaskVector.load(tmp_path / "v"))
    (tmp_path / "other").mkdir()
    two.save(tmp_path / "other")  # an empty folder may be used
    shutil.rmtree(tmp_path / "other")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    for overwrite in (True, False):
        with pytest.raises(TaskVectorError, match=r"mine holds other files.*new or empty folder"):
            two.save(tmp_path / "mine", overwrite=overwrite)
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"
    with pytest.raises(TaskVectorError, match="is a file; the output needs a folder"):
        two.save(tmp_path / "mine" / "thesis.txt")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "v"]


class Failing(InMemory):
    def read(self) -> torch.Tensor:
        raise KeyboardInterrupt


@pytest.mark.parametrize("before", [True, False])
def test_an_interrupted_save_leaves_nothing_new(tmp_path: Path, before: bool) -> None:
    good = TaskVector.from_tensors({"a": torch.ones(2)})
    if before:
        good.save(tmp_path / "v")
    factors = LowRank(InMemory(torch.ones(2, 1)), Failing(torch.ones(1, 2)))
    bad = good + TaskVector({"w": [Term(1.0, factors)]})
    with pytest.raises(KeyboardInterrupt):
        bad.save(tmp_path / "v", overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == (["v"] if before else [])
    if before:
        assert_same(good, TaskVector.load(tmp_path / "v"))
    bad = good.filter(include="a") + TaskVector(
        {"w": [Term(1.0, LowRank(InMemory(torch.ones(2, 1)), InMemory(torch.ones(1, 2))))]}
    )
    bad.save(tmp_path / "v", overwrite=True)
    assert len(TaskVector.load(tmp_path / "v")) == 2


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TaskVectorError, match="cannot write to v"):
        TaskVector.from_tensors({"w": torch.ones(2)}).save(tmp_path / "file" / "v")


# Reading.


def test_a_saved_vector_is_loaded_from_the_hub_by_revision(tmp_path: Path, hub: HubServer) -> None:
    vector = mixture()
    vector.save(tmp_path / "v")
    first = hub.add_repo("me/vector", tmp_path / "v")
    hub.add_repo("me/vector", {"README.md": b"nothing"})
    assert_same(vector, TaskVector.load("me/vector", revision=first))
    assert_same(vector, TaskVector.load(f"me/vector@{first}"))
    with pytest.raises(TaskVectorError, match=r"me/vector has no taskvec\.json"):
        TaskVector.load("me/vector")


def test_nothing_is_read_until_used(tmp_path: Path) -> None:
    """A damaged tensor is found when it is used, and the others remain usable."""
    vector = TaskVector.from_tensors({"a": torch.zeros(100), "b": torch.ones(100)})
    vector.save(tmp_path / "v")
    damage(tmp_path / "v" / TENSORS, -1)
    loaded = TaskVector.load(tmp_path / "v")
    combined = 0.5 * loaded - loaded / 3
    assert combined.dense("a").tolist() == [0.0] * 100
    for _ in range(2):  # not only the first time
        with pytest.raises(TaskVectorError, match=r"b:0\.part0 in taskvec\.safetensors does not match its checksum"):
            combined.dense("b")
    assert TaskVector.load(tmp_path / "v", verify=False).dense("b")[-1] != 1.0


def damage(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    replace(path, bytes(content))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    mixture().save(tmp_path / "v")
    return tmp_path / "v"


def edited(folder: Path, edit: Callable[[dict[str, Any]], object], sign: bool = True) -> Path:
    """A saved vector whose JSON says something else, with a checksum that agrees (or not)."""
    path = folder / JSON
    document = json.loads(path.read_text())
    edit(document)
    if sign:
        document.pop("checksum", None)
        text = json.dumps(document, sort_keys=True, ensure_ascii=False)
        document["checksum"] = hashlib.sha256(text.encode()).hexdigest()
    path.write_text(json.dumps(document))
    return folder


@pytest.mark.parametrize(("version", "tag"), [(2, ""), (3, "blocks:")])
def test_vectors_of_before_are_read_and_checked(saved: Path, version: int, tag: str) -> None:
    """Their digests are SHA-256, of all bytes or of blocks."""
    kept = TaskVector.load(saved)

    def edit(document: dict[str, Any]) -> None:
        document["format"] = version
        for name, entry in document["tensors"].items():
            stored = load_file(saved / entry["file"])[name]
            entry["sha256"] = tensor_digest(stored, like=tag + "0" * 64)

    found = TaskVector.load(edited(saved, edit))
    assert all(torch.equal(found.dense(name), kept.dense(name)) for name in kept)
    edited(saved, lambda document: next(iter(document["tensors"].values())).update(sha256=tag + "0" * 64))
    with pytest.raises(TaskVectorError, match="damaged"):
        {name: each.dense() for name, each in TaskVector.load(saved).items()}


def test_an_unknown_format_version_is_refused(saved: Path) -> None:
    for version in (5, "1", None, True):
        edited(saved, lambda document, version=version: document.update(format=version))
        with pytest.raises(TaskVectorError, match=rf"v has task vector format {version!r}; .*reads formats up to 4"):
            TaskVector.load(saved)


def test_an_edited_json_is_refused_unless_checks_are_off(saved: Path) -> None:
    edited(saved, lambda document: document["parameters"]["dense"][0].update(weight=2.0), sign=False)
    with pytest.raises(TaskVectorError, match=r"taskvec\.json of v does not match its checksum.*verify=False"):
        TaskVector.load(saved)
    assert TaskVector.load(saved, verify=False)["dense"].terms[0].weight == 2.0


@pytest.mark.parametrize("file", ["../v/taskvec.safetensors", "/etc/passwd", "", "..", ".", 3, "a\0b", "x" * 300])
def test_paths_that_leave_the_folder_are_refused(saved: Path, file: object) -> None:
    def escape(document: dict[str, Any]) -> None:
        next(iter(document["tensors"].values()))["file"] = file

    escapes = isinstance(file, str) and file.startswith(("/", "../"))
    with pytest.raises(TaskVectorError, match="outside its folder.*Do not trust" if escapes else ""):
        TaskVector.load(edited(saved, escape))


def test_missing_files_are_named(saved: Path, tmp_path: Path) -> None:
    (saved / TENSORS).unlink()
    with pytest.raises(TaskVectorError, match=r"taskvec\.safetensors is missing in v\. Download or save"):
        TaskVector.load(saved)
    with pytest.raises(TaskVectorError, match=r"has no taskvec\.json"):
        TaskVector.load(tmp_path)
    with pytest.raises(TaskVectorError, match="no folder 'nowhere'"):
        TaskVector.load(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "edit",
    [
        lambda d: d.pop("parameters"),
        lambda d: d.pop("tensors"),
        lambda d: d.pop("provenance"),
        lambda d: d.update(parameters=[]),
        lambda d: d["parameters"]["dense"].append({"kind": "dense"}),
        lambda d: d["parameters"]["dense"][0].update(kind="cubic"),
        lambda d: d["parameters"]["dense"][0].update(parts=[]),
        lambda d: d["parameters"]["dense"][0].update(parts=["nothing"]),
        lambda d: d["parameters"]["dense"][0].update(weight="heavy"),
        lambda d: d["parameters"]["dense"][0].update(weight=math.nan),
        lambda d: d["parameters"]["low rank"][0].update(scaling=math.inf),
        lambda d: d["parameters"]["scattered rows"][0].update(rows=[1, 2, 77]),
        lambda d: d["parameters"]["scattered rows"][0].update(rows=["a", "b", "c"]),
        lambda d: d["parameters"]["scattered rows"][0].update(of=2),
        lambda d: d["parameters"]["a range of rows"][0]["rows"].update(stop=99),
        lambda d: d["parameters"]["DoRA of Linear"][0].update(axis=7),
        lambda d: d["parameters"]["DoRA of Linear"][0].update(low_rank=d["parameters"]["dense"][0]),
        lambda d: d["parameters"]["low rank"][0].update(left={"transposed": {"transposed": []}}),
        lambda d: d["parameters"]["low rank"][0].update(left=nested(900)),
        lambda d: d["parameters"].update(dense=d["parameters"]["dense"] + d["parameters"]["low rank"] * 2),
        lambda d: next(iter(d["tensors"].values())).update(dtype="int8"),
        lambda d: next(iter(d["tensors"].values())).update(shape=[1]),
        lambda d: next(iter(d["tensors"].values())).update(sha256=None),
        lambda d: d["provenance"].update(weights=[["a"]]),
        lambda d: d["provenance"].update(origins=[{"label": 3}]),
        lambda d: d.update(discarded=[1]),
        lambda d: d.update(checkpoints=[]),
    ],
)
def test_json_that_makes_no_sense_never_crashes(saved: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Even with the right checksum, or without a check: our own error, or numbers."""
    edited(saved, edit)
    for verify in (True, False):
        try:
            values(TaskVector.load(saved, verify=verify))
        except TaskVectorError as error:
            assert str(error)


def nested(depth: int) -> Any:
    """A matrix transposed so often that a reader that recurses gets into trouble."""
    entry: Any = "low rank:0.left"
    for _ in range(depth):
        entry = {"transposed": entry}
    return entry


# Damage of every sort.


def small(folder: Path) -> TaskVector:
    """A vector whose files are small, so that most damage hits something."""
    terms = {
        kind: [Term(0.5, KINDS[kind](torch.Generator().manual_seed(0))[0])]
        for kind in ("difference", "low rank", "DoRA of Conv1D", "scattered rows")
    }
    vector = TaskVector(terms, Provenance.of(Origin("v", "made for a test")))
    vector.save(folder)
    return vector


def test_damage_is_always_noticed(tmp_path: Path) -> None:
    corrupt_saved(tmp_path / "v", 4000)


@pytest.mark.slow
def test_damage_is_always_noticed_tens_of_thousands_of_times(tmp_path: Path) -> None:
    corrupt_saved(tmp_path / "v", 30_000, seed=1)


def corrupt_saved(folder: Path, count: int, seed: int = 0) -> None:
    right = values(small(folder))
    corruptor, refused = Corruptor(seed), 0
    for number in range(count):
        with corruptor.corrupted(folder / (JSON, TENSORS)[number % 2]):
            try:
                found = values(TaskVector.load(folder))
            except TaskVectorError:
                refused += 1
                continue
        assert list(found) == list(right), number
        assert all(torch.equal(found[name], right[name]) for name in right), number
    assert refused > count / 2


def test_every_cut_is_noticed(tmp_path: Path) -> None:
    small(tmp_path / "v")
    for name, content in (
        (JSON, (tmp_path / "v" / JSON).read_bytes()),
        (TENSORS, (tmp_path / "v" / TENSORS).read_bytes()),
    ):
        for length in range(0, len(content) - 1, 61):
            replace(tmp_path / "v" / name, content[:length])
            with pytest.raises(TaskVectorError):
                values(TaskVector.load(tmp_path / "v"))
        replace(tmp_path / "v" / name, content)


def test_edited_json_without_checks_never_crashes(tmp_path: Path) -> None:
    """With verify=False numbers may be others, but errors are still ours."""
    small(tmp_path / "v")
    corruptor = Corruptor(seed=3)
    for _ in range(500):
        with corruptor.corrupted(tmp_path / "v" / JSON), suppress(TaskVectorError):
            values(TaskVector.load(tmp_path / "v", verify=False))


@pytest.fixture
def big(tmp_path: Path) -> Iterator[Path]:
    TaskVector.from_tensors({"w": torch.randn(1000, 600)}).save(tmp_path / "big")
    yield tmp_path / "big"


def test_a_tensor_of_many_tiles_is_loaded_whole(big: Path) -> None:
    loaded = TaskVector.load(big)
    stored = load_file(big / TENSORS)["w:0.part0"]
    assert torch.equal(loaded.dense("w"), stored)
    assert loaded.norm() == pytest.approx(stored.double().norm().item(), rel=1e-12)


def test_saved_tensors_are_plain_safetensors(saved: Path) -> None:
    stored = load_file(saved / TENSORS)
    assert {name.rpartition(".")[2] for name, tensor in stored.items() if not tensor.is_floating_point()} == {
        "counts",
        "offsets",
    }
    assert set(load_file(saved / TENSORS)) == set(json.loads((saved / JSON).read_text())["tensors"])


def test_saving_and_loading_leaves_the_models_files_alone(models: TinyModels, tmp_path: Path) -> None:
    pair = models.pair("phi")
    before = {name: source.read().clone() for name, source in tensors(pair.tuned).items()}
    vector = pair.vector()
    vector.save(tmp_path / "v")
    vector.compress(rank=2), vector.norm()
    assert all(torch.equal(before[name], source.read()) for name, source in tensors(pair.tuned).items())
