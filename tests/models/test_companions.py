"""What belongs to a model besides its weights."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest
import transformers
from support.hub_server import HubServer
from support.tiny_models import TinyModels
from transformers import tokenization_utils_base, utils

from hf_taskvec.errors import CorruptFileError, UnsupportedError
from hf_taskvec.models.companions import companions


def found(folder: Path) -> list[str]:
    return [path.relative_to(folder).as_posix() for path in companions(folder)]


def test_configs_tokenizer_and_licence_belong_to_a_model_and_other_files_do_not(tmp_path: Path) -> None:
    ours = ["LICENSE.txt", "additional_chat_templates/tool.jinja", "chat_template.jinja", "config.json", "merges.txt"]
    ours += ["tokenizer.json", "tokenizer.model"]
    others = [".hidden.json", "README.md", "adapter_config.json", "model.safetensors", "model.safetensors.index.json"]
    others += ["taskvec.json", "taskvec_apply.json", "trainer_state.json", "training.json", "optimizer.pt"]
    others += ["credentials.json", "service-account.json", "wandb-settings.json", "modeling_mine.py", "upload.py"]
    others += [".env", "additional_chat_templates/keys.txt", "notes.txt", ".secret.model"]
    (tmp_path / "additional_chat_templates").mkdir()
    for name in (*ours, *others):
        (tmp_path / name).write_text("{}")
    assert found(tmp_path) == ours


def test_all_names_that_transformers_knows_are_taken(tmp_path: Path) -> None:
    """Read off its sources: most tokenizers cannot be imported without packages that are not installed."""
    known = {
        value
        for module in (utils, tokenization_utils_base)
        for name, value in vars(module).items()
        if re.fullmatch(r"[A-Z_]+_(NAME|FILE)", name) and isinstance(value, str)
    }
    for source in Path(transformers.__file__).parent.glob("models/*/tokenization_*.py"):
        for names in re.findall(r"VOCAB_FILES_NAMES\s*=\s*(\{.*?\})", source.read_text("utf-8"), re.DOTALL):
            known |= {name for name in ast.literal_eval(names).values() if name}
    no_companions = {"modelcard.json", "adapter_config.json", "TRANSFORMERS_DYNAMIC_MODULE_NAME"}
    known -= no_companions | {name for name in known if "safetensors" in name or ".bin" in name or "." not in name}
    assert {"config.json", "generation_config.json", "tokenizer.json", "vocab.txt", "merges.txt"} < known
    for name in known:
        (tmp_path / name).write_text("{}")
    assert found(tmp_path) == sorted(known)


def _write(folder: Path, files: dict[str, object]) -> None:
    for name, content in files.items():
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))


def test_code_belongs_to_a_model_if_its_configs_name_it(tmp_path: Path) -> None:
    maps = {
        "config.json": {"AutoConfig": "configuration_mine.Config", "AutoModel": "other/repo--modeling_theirs.Model"},
        "tokenizer_config.json": {"AutoTokenizer": ["tokenization_mine.Slow", None]},
    }
    _write(tmp_path, {name: {"auto_map": each} for name, each in maps.items()})
    _write(
        tmp_path,
        {
            "configuration_mine.py": "from .helpers import a\nfrom ..outside import b\nimport os\n",
            "helpers.py": "from .deeper import c\nfrom .missing import d\n",
            "deeper.py": "from .helpers import a\n",
            "tokenization_mine.py": "",
            "modeling_theirs.py": "",
            "upload.py": "TOKEN = 'hf_secret'",
        },
    )
    code = ["configuration_mine.py", "deeper.py", "helpers.py", "tokenization_mine.py"]
    assert [name for name in found(tmp_path) if name.endswith(".py")] == code


@pytest.mark.parametrize("name", ["../outside.Class", "/etc/hosts.Class", "..\\outside.Class", ".hidden.Class"])
def test_code_outside_of_the_folder_is_not_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "outside.py").write_text("")
    _write(tmp_path / "model", {"config.json": {"auto_map": {"AutoModel": name}}})
    with pytest.raises(CorruptFileError, match=r"auto_map in config\.json names no module of its folder"):
        companions(tmp_path / "model")


@pytest.mark.parametrize("target", ["../id_rsa", "nothing", "../other/blobs/0123"])
def test_a_link_that_leads_out_of_the_folder_is_refused(tmp_path: Path, target: str) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "other" / "blobs").mkdir(parents=True)
    for file in (tmp_path / "id_rsa", tmp_path / "other" / "blobs" / "0123"):
        file.write_text("private")
    (tmp_path / "model" / "LICENSE").symlink_to(target)
    with pytest.raises(UnsupportedError, match=r"^LICENSE in model is a link that leads out of the folder, or to"):
        companions(tmp_path / "model")


def test_a_folder_of_links_to_outside_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "key.jinja").write_text("private")
    (tmp_path / "model" / "additional_chat_templates").symlink_to(tmp_path / "private")
    with pytest.raises(UnsupportedError, match=r"additional_chat_templates/key\.jinja in model is a link"):
        companions(tmp_path / "model")


def test_a_link_within_the_folder_is_as_good_as_a_file(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("a")
    (tmp_path / "dict.txt").symlink_to("vocab.txt")
    assert found(tmp_path) == ["dict.txt", "vocab.txt"]


def test_an_output_holds_what_the_hubs_cache_has_of_its_base(
    hub: HubServer, models: TinyModels, tmp_path: Path
) -> None:
    """A snapshot in the cache is a folder of links."""
    pair = models.pair("phi")
    served = tmp_path / "served"
    served.mkdir()
    for path in pair.base.iterdir():
        (served / path.name).write_bytes(path.read_bytes())
    _write(served, {"LICENSE": "free", "vocab.txt": "a", "credentials.json": "{}", "train.py": ""})
    hub.add_repo("me/with-companions", served)
    pair.vector().apply("me/with-companions", tmp_path / "out")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"LICENSE", "vocab.txt", "config.json", "generation_config.json", "model.safetensors"} | {
        "taskvec_apply.json"
    }


def test_a_link_out_of_the_base_is_refused_before_anything_is_written(models: TinyModels, tmp_path: Path) -> None:
    pair = models.pair("phi")
    base = tmp_path / "base"
    base.mkdir()
    for path in pair.base.iterdir():
        (base / path.name).write_bytes(path.read_bytes())
    (base / "tokenizer_config.json").symlink_to(Path(__file__))
    with pytest.raises(UnsupportedError, match=r"tokenizer_config\.json in base is a link"):
        pair.vector().apply(base, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["base"]
