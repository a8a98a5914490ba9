"""A task vector from whatever holds one."""

import shutil
from pathlib import Path

import pytest
from support.hub_server import HubServer
from support.tiny_models import Pair, TinyModels

from hf_taskvec import TaskVector
from hf_taskvec.errors import BadValueError, MissingFileError
from hf_taskvec.extraction.from_any import open_vector


@pytest.fixture(scope="module")
def pair(models: TinyModels) -> Pair:
    return models.pair("phi")


@pytest.fixture(scope="module")
def adapter(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("opening") / "adapter"
    small = pair.vector().filter(include="*q_proj.weight").compress(rank=2)
    small.to_adapter(folder, base_model_name_or_path=str(pair.base))
    return folder


@pytest.fixture(scope="module")
def saved(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("opening") / "saved"
    pair.vector().save(folder)
    return folder


def how(vector: TaskVector) -> str:
    return vector.provenance.origins[0].how


def test_each_kind_of_folder_is_recognised(pair: Pair, adapter: Path, saved: Path) -> None:
    tuned = open_vector(pair.tuned, pair.base, name="t")
    assert how(tuned) == "full fine-tune" and tuned.expression == "t"
    assert open_vector(adapter).is_low_rank and open_vector(adapter, pair.base, name="a").expression == "a"
    loaded = open_vector(saved, name="s")
    assert loaded.expression == "s" and set(loaded) == set(tuned) == set(open_vector(saved))


def test_of_a_model_and_an_adapter_in_one_folder_the_base_decides(pair: Pair, adapter: Path, tmp_path: Path) -> None:
    both = tmp_path / "both"
    shutil.copytree(pair.tuned, both)
    shutil.copytree(adapter, both, dirs_exist_ok=True)
    assert how(open_vector(both, pair.base)) == "full fine-tune"
    assert open_vector(both).is_low_rank


def test_vectors_are_opened_from_the_hub(hub: HubServer, pair: Pair, adapter: Path, saved: Path) -> None:
    commit = hub.add_repo("me/tuned", pair.tuned)
    hub.add_repo("me/tuned", {"README.md": b"without weights"})
    hub.add_repo("me/adapter", adapter)
    hub.add_repo("me/saved", saved)
    assert how(open_vector(f"me/tuned@{commit}", pair.base)) == "full fine-tune"
    assert open_vector("me/adapter").is_low_rank
    assert set(open_vector("me/saved")) == set(pair.vector())


def test_bad_input_is_refused(pair: Pair, adapter: Path, saved: Path, tmp_path: Path) -> None:
    with pytest.raises(BadValueError, match=r"tuned is no task vector and no adapter.*needs the base as well"):
        open_vector(pair.tuned)
    for where in (adapter, saved):
        with pytest.raises(BadValueError, match=f"vocabulary is for full fine-tunes, and {where.name} is none"):
            open_vector(where, pair.base, vocabulary="truncate")
    with pytest.raises(MissingFileError, match="no folder 'nowhere'"):
        open_vector(tmp_path / "nowhere")
