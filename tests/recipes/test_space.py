"""The Space: its steps against the library's own ways, and the whole of it in a browser, as a visitor uses it."""

from __future__ import annotations

import copy
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import pytest
import torch
import yaml
from peft import LoraConfig, get_peft_model
from support import tiny_models
from support.browser import browser, needs_browser
from support.hub_server import TOKEN, HubServer
from support.tiny_books import make_books, make_tokenizer, tiny_llama, train
from transformers import AutoModelForCausalLM

from hf_taskvec import TaskVector
from hf_taskvec.errors import BadValueError, MismatchError, MissingFileError, UnsupportedError

SPACE = Path(__file__).resolve().parents[2] / "recipes" / "space"
PROMPT = "The lamps were"


@pytest.fixture(scope="module")
def steps() -> Any:
    spec = importlib.util.spec_from_file_location("space_steps", SPACE / "steps.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where its dataclass looks for its own types
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base with its tokenizer, a fine-tune, and an adapter that names `me/base`."""
    folder = tmp_path_factory.mktemp("space")
    tokenizer, books, base = make_tokenizer(), make_books(), tiny_llama()
    base.save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    train(copy.deepcopy(base), tokenizer, books[:1], 20).save_pretrained(folder / "tuned")
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"])
    adapted = train(get_peft_model(copy.deepcopy(base), config), tokenizer, books[1:], 20, lr=1e-2)
    adapted.peft_config["default"].base_model_name_or_path = "me/base"
    adapted.save_pretrained(folder / "adapter")
    return folder


@pytest.fixture
def on_hub(hub: HubServer, made: Path) -> HubServer:
    for name in ("base", "tuned", "adapter"):
        hub.add_repo(f"me/{name}", made / name)
    return hub


def written(folder: Path, words: int = 12) -> str:
    """What a model in a folder goes on with, by transformers alone."""
    tokenizer, model = make_tokenizer(), AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    whole = model.generate(ids, max_new_tokens=words, do_sample=False, pad_token_id=0)
    return tokenizer.decode(whole[0, ids.shape[1] :], skip_special_tokens=True)


def test_headers_are_compared_before_weights_are_downloaded(steps: Any, on_hub: HubServer) -> None:
    opened = steps.compare_headers("me/base", "me/tuned\nme/adapter\n")
    assert list(opened.vectors) == ["tuned", "adapter"]
    assert opened.expression == "tuned + adapter"
    assert "dense differences" in opened.text and "low-rank factors" in opened.text
    assert "to download" in opened.text and "of memory at most" in opened.text and "seconds" in opened.text
    stored = [path for path in on_hub.home.rglob("*.safetensors") if "adapter" not in path.name]
    assert stored == []
    weights = sum(len(on_hub.files(f"me/{name}")["model.safetensors"]) for name in ("base", "tuned"))
    adapter = len(on_hub.files("me/adapter")["adapter_model.safetensors"])
    assert opened.download == weights + adapter


def test_an_adapter_tells_its_base(steps: Any, on_hub: HubServer) -> None:
    assert steps.compare_headers("", "me/adapter").base == "me/base"
    with pytest.raises(BadValueError, match="base"):
        steps.compare_headers("", "me/tuned")


def test_what_does_not_fit_is_refused(steps: Any, on_hub: HubServer, tmp_path: Path) -> None:
    tiny_models.make("llama", hidden_size=32).save_pretrained(tmp_path / "other")
    on_hub.add_repo("me/other", tmp_path / "other")
    with pytest.raises(MismatchError):
        steps.compare_headers("me/other", "me/adapter")
    with pytest.raises(BadValueError, match="too many"):
        steps.compare_headers("me/base", "\n".join(["me/adapter"] * 5))


def test_a_visitor_names_no_folder_of_the_machine(steps: Any, made: Path) -> None:
    for base, tuned in ((str(made / "base"), "me/tuned"), ("me/base", str(made / "tuned")), ("me/base", "../tuned")):
        with pytest.raises(BadValueError, match="no Hub id"):
            steps.compare_headers(base, tuned)
    assert steps.compare_headers(str(made / "base"), str(made / "tuned"), folders=True).download == 0


def test_models_are_read_without_the_machines_token(steps: Any, on_hub: HubServer, made: Path) -> None:
    assert os.environ["HF_TOKEN"] == TOKEN
    on_hub.add_repo("me/secret", made / "tuned", private=True)
    with pytest.raises(MissingFileError):
        steps.compare_headers("me/base", "me/secret")
    assert len(TaskVector.from_finetuned("me/base", "me/secret"))  # with the machine's own token it could be read


def test_the_look_has_norms_ranks_and_cosines_by_layer(steps: Any, made: Path) -> None:
    tuned, adapter = (str(made / name) for name in ("tuned", "adapter"))
    opened = steps.extract(steps.compare_headers(str(made / "base"), f"{tuned}\n{adapter}", folders=True))
    head, rows, figures = steps.look_at(opened)
    assert head[:3] == ["layer", "‖tuned‖", "‖adapter‖"] and head[-1] == "cos(tuned, adapter)"
    layers = {row[0]: row for row in rows}
    assert set(layers) == {"0", "1", "outside"}
    one, other = (opened.vectors[name] for name in ("tuned", "adapter"))
    first = {name for name in one if ".layers.0." in name}
    product = sum(float((one[n].dense().double() * other[n].dense().double()).sum()) for n in first if n in other)
    norms = [sum(float(v[n].dense().double().pow(2).sum()) for n in first if n in v) ** 0.5 for v in (one, other)]
    assert float(layers["0"][1]) == pytest.approx(norms[0], rel=1e-3)
    assert float(layers["0"][-1]) == pytest.approx(product / norms[0] / norms[1], abs=6e-4)
    assert len(figures) == 3


@pytest.mark.parametrize("source", ["adapter", "tuned"])
def test_both_answers_are_those_of_models_in_folders(steps: Any, made: Path, tmp_path: Path, source: str) -> None:
    opened = steps.compare_headers(str(made / "base"), str(made / source), folders=True)
    live = steps.LiveModel()
    opened.vectors[source].apply(made / "base", tmp_path / "edited", scale=1.5)
    before, after = live.answers(opened, "", PROMPT, 1.5, 12)
    assert before == written(made / "base")
    assert after == written(tmp_path / "edited")
    assert before != after
    assert live.answers(opened, f"0.5 * {source}", PROMPT, 3.0, 12) == (before, after)
    assert live.answers(opened, source, PROMPT, 0.0, 12) == (before, before)


def test_a_model_too_large_is_not_loaded(steps: Any, made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = steps.compare_headers(str(made / "base"), str(made / "adapter"), folders=True)
    monkeypatch.setattr(steps, "free_memory", lambda device: 1000)
    with pytest.raises(UnsupportedError, match="too large to be tried here"):
        steps.LiveModel().answers(opened, "", PROMPT, 1.0, 4)


def test_the_card_that_is_shown_is_the_card_that_is_pushed(steps: Any, on_hub: HubServer, made: Path) -> None:
    opened = steps.compare_headers("me/base", "me/adapter")
    for product, repo in zip(steps.PRODUCTS, ("me/one", "me/two", "me/three"), strict=True):
        shown = steps.card(opened, "", -0.6, product, repo, "to forget")
        pushed = steps.push(opened, "", -0.6, product, repo, "to forget", False, f" {TOKEN}\n")
        assert pushed.changed
        assert on_hub.files(repo)["README.md"].decode() == shown
    merged = AutoModelForCausalLM.from_pretrained("me/one").state_dict()
    plain = AutoModelForCausalLM.from_pretrained(made / "base")
    with TaskVector.from_adapter(made / "adapter").applied_to(plain, -0.6):
        assert all(torch.equal(value, merged[name]) for name, value in plain.state_dict().items())


def test_a_push_takes_the_visitors_token_and_no_other(steps: Any, on_hub: HubServer) -> None:
    opened = steps.compare_headers("me/base", "me/adapter")
    with pytest.raises(BadValueError, match="your own token"):
        steps.push(opened, "", 1.0, "the task vector", "me/new", "", True, "  ")
    assert on_hub.count("/api/repos/create") == 0


def test_the_card_of_the_space_and_what_it_installs() -> None:
    card = yaml.safe_load((SPACE / "README.md").read_text("utf-8").split("---")[1])
    assert card["sdk"] == "gradio" and (SPACE / card["app_file"]).exists()
    wanted = (SPACE / "requirements.txt").read_text("utf-8").splitlines()
    assert "gradio>=6,<7" in wanted and card["sdk_version"].startswith("6.")
    if importlib.util.find_spec("gradio") is not None:
        assert version("gradio").split(".")[0] == "6"


# In a browser.


def until(what: Any, seconds: float = 120.0) -> Any:
    """What `what` gives, once that is something. A page changes under its reader: errors of the driver are nothing."""
    from selenium.common.exceptions import WebDriverException

    end = time.monotonic() + seconds
    while True:
        try:
            if found := what():
                return found
        except (WebDriverException, URLError, ConnectionError):
            pass
        assert time.monotonic() < end, "the page did not change in time"
        time.sleep(0.1)


@pytest.fixture
def served(on_hub: HubServer, tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """The address of the app, as it runs on a Space, and what it printed."""
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    root = str(SPACE.parents[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    environment |= {"GRADIO_TEMP_DIR": str(tmp_path / "gradio"), "HF_TOKEN": ""}
    log = tmp_path / "log"
    with log.open("w") as printed:
        command = [sys.executable, str(SPACE / "app.py"), "--port", str(port)]
        process = subprocess.Popen(command, env=environment, stdout=printed, stderr=subprocess.STDOUT)
        try:
            until(lambda: urlopen(f"http://127.0.0.1:{port}/", timeout=5).status == 200)
            yield f"http://127.0.0.1:{port}/", log
        finally:
            process.terminate()
            process.wait()


@pytest.mark.slow
@needs_browser
@pytest.mark.skipif(importlib.util.find_spec("gradio") is None, reason='needs pip install "hf-taskvec[space]"')
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_a_visitor_goes_from_two_ids_to_a_pushed_model(
    served: tuple[str, Path], on_hub: HubServer, tmp_path: Path, width: int, dark: bool
) -> None:
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    address, log = served
    with browser(width, dark=dark) as page:

        def part(name: str, inside: str = "") -> Any:
            return page.find_element(By.CSS_SELECTOR, f"#{name} {inside}".strip())

        def said(name: str) -> str:
            return part(name, "textarea").get_property("value")

        page.get(address)
        until(lambda: part("look")).click()
        until(lambda: "Compare the headers first" in page.find_element(By.TAG_NAME, "body").text)
        part("base", "textarea, #base input").send_keys("me/base")
        part("tuned", "textarea").send_keys("me/adapter")
        part("compare").click()
        until(lambda: "The headers fit" in part("headers").text)
        assert "to download" in part("headers").text
        part("look").click()
        until(lambda: "stable rank of adapter" in part("layers").text)

        prompt = part("prompt", "textarea")
        prompt.clear()
        prompt.send_keys(PROMPT)
        part("answer").click()
        until(lambda: said("before") and said("after"))
        first, slider = said("after"), part("scale", "input[type=range]")
        slider.send_keys(Keys.END)
        until(lambda: said("after") != first)
        assert said("before")
        slider.send_keys(Keys.HOME)
        until(lambda: part("scale", "input[type=number]").get_property("value") == "-2")

        part("repo", "textarea, #repo input").send_keys("me/shared")
        part("card-button").click()
        until(lambda: "library_name" in part("card").text)
        part("push").click()
        until(lambda: "your own token" in page.find_element(By.TAG_NAME, "body").text)
        field = part("token", "input")
        assert field.get_attribute("type") == "password"
        field.send_keys(TOKEN)
        part("push").click()
        until(lambda: "me/shared" in part("pushed").text)
        until(lambda: field.get_property("value") == "")
        wide, room = page.execute_script("return [document.documentElement.scrollWidth, window.innerWidth]")
        assert wide <= room
    assert "model.safetensors" in on_hub.files("me/shared")
    kept = [path for path in (*on_hub.home.rglob("*"), *(tmp_path / "gradio").rglob("*"), log) if path.is_file()]
    assert not [path for path in kept if TOKEN.encode() in path.read_bytes()]
