"""The loopback Hub, up before any test module is imported.

huggingface_hub reads its endpoint and its cache folder from the environment when it is imported, and never
again. So the server starts here, at import. Each worker of pytest-xdist imports this file, and so has a
server and a cache of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from support.hub_server import HubServer

if TYPE_CHECKING:
    from support.edited_model import Edited
    from support.tiny_models import TinyModels

if "huggingface_hub" in sys.modules:
    raise RuntimeError("huggingface_hub was imported before tests/conftest.py: it would talk to the real Hub")

_HUB = HubServer().start()
os.environ.update(_HUB.environment())
# In each worker, and in the processes that tests launch: the bits of a matrix product hang on the number of threads.
os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
# What processes keep for later ones is in the server's folder, whatever the developer's shell has switched off.
os.environ.update(HF_TASKVEC_DISABLE_CACHE="0")


# The same examples in every run: a failure that a developer sees is the one that CI sees.
settings.register_profile("reproducible", deadline=None, derandomize=True)
settings.load_profile("reproducible")


def pytest_unconfigure() -> None:
    _HUB.stop()


@pytest.fixture(autouse=True, scope="session")
def _every_sum_is_compiled() -> None:
    """Tests are about small tensors, for which no machine code would be made."""
    from hf_taskvec.algebra import formulas

    formulas.LEAST = 0


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """No test leaves torch with another number of threads: what runs after it would have other last bits."""
    yield
    if "torch" in sys.modules:
        torch = sys.modules["torch"]
        found = torch.get_num_threads()
        torch.set_num_threads(1)
        assert found == 1


@pytest.fixture(scope="session")
def shared() -> Path:
    """Real books, models and tokenizers; tests that need them skip without them."""
    beside = Path(__file__).resolve().parents[2] / "shared"
    for root in (os.environ.get("HF_TASKVEC_SHARED"), beside):
        if root and (Path(root) / "data").is_dir():
            return Path(root) / "data"
    pytest.skip("the shared data is not here (set HF_TASKVEC_SHARED)")


@pytest.fixture
def hub() -> Iterator[HubServer]:
    """The Hub without repos, log or faults, and a client that has nothing in its caches."""
    from huggingface_hub import HfFileSystem

    _HUB.clear()
    HfFileSystem.clear_instance_cache()  # it remembers, within the process, which repos exist
    yield _HUB
    _HUB.clear()


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    """Tiny models of every architecture in folders, saved once per session."""
    from support.tiny_models import TinyModels  # not before the environment is set: it imports transformers

    return TinyModels(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package as a user gets it: built as a wheel, and installed with its command."""
    folder = tmp_path_factory.mktemp("installed")
    root = Path(__file__).parents[1]
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    wheel = [*pip, "wheel", str(root), "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder / "wheel")]
    subprocess.run(wheel, check=True)
    found = next((folder / "wheel").glob("*.whl"))
    subprocess.run([*pip, "install", "--no-deps", "--target", str(folder / "site"), str(found)], check=True)
    return folder / "site"


@pytest.fixture(scope="session")
def edited(tmp_path_factory: pytest.TempPathFactory) -> Edited:
    """A base, a fine-tune, two books, and a sweep of the edit, each made when first asked for."""
    from support.edited_model import Edited

    return Edited(tmp_path_factory.mktemp("edited"))


# Run by the Python of another environment, which has mergekit.
collect_ignore = ["support/mergekit_reference.py"]
