"""The loopback Hub as its real clients see it: huggingface_hub, transformers, peft and datasets."""

import os
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import torch
from datasets import load_dataset
from huggingface_hub import (
    CommitOperationDelete,
    HfApi,
    ModelCard,
    constants,
    hf_hub_download,
    snapshot_download,
)
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from peft import LoraConfig, PeftModel, get_peft_model
from support.hub_server import OTHER_TOKEN, TOKEN, HubServer
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

REPO = "me/model"
WEIGHTS = bytes(range(256)) * 4096  # 1 MiB, more than the sockets' buffers would swallow unseen
FILES = {
    "config.json": b'{"a": 1}\n',
    "model.safetensors": WEIGHTS,
    "plots/sweep.png": b"\x89PNG\0\0",
    "empty": b"",
}


@pytest.fixture
def api(hub: HubServer) -> HfApi:
    return HfApi()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "folder", FILES)


@pytest.fixture(scope="module")
def model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=32))


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def read(folder: str | Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in Path(folder).rglob("*") if p.is_file()}


def status_of(error: pytest.ExceptionInfo[HfHubHTTPError]) -> int:
    return error.value.response.status_code


def fetch(url: str, data: bytes | None = None, **headers: str) -> tuple[int, bytes, str | None]:
    """Status, body and Content-Range of a request that huggingface_hub would not send."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers)) as response:
            return response.status, response.read(), response.headers["Content-Range"]
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read(), error.headers["Content-Range"]


# The server itself


def test_the_client_is_bound_to_this_server(hub: HubServer, api: HfApi) -> None:
    assert hub.url == constants.ENDPOINT
    assert hub.home == Path(constants.HF_HUB_CACHE).parent
    assert api.whoami()["name"] == "me"


def test_a_server_needs_the_standard_library_only_and_serves_a_subprocess() -> None:
    with HubServer() as own:
        own.add_repo("me/data", {"a.txt": b"hello"}, repo_type="dataset")
        code = "import huggingface_hub as h; print(h.HfApi().dataset_info('me/data').siblings[0].rfilename)"
        environment = os.environ | own.environment()
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
        home = own.home
    assert done.stdout.strip() == "a.txt", done.stderr
    assert not home.exists()

    code = "import sys, hub_server; print(*{m.split('.')[0] for m in sys.modules} - sys.stdlib_module_names)"
    command = [sys.executable, "-S", "-c", code]
    here = {"PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run(command, env=here, capture_output=True, text=True)
    assert set(done.stdout.split()) == {"__main__", "hub_server"}, done.stderr


def test_parts_of_files_are_served_by_range(hub: HubServer) -> None:
    hub.add_repo(REPO, FILES)
    for name in ("config.json", "model.safetensors"):  # the second is redirected to the other origin
        url, data = f"{hub.url}/{REPO}/resolve/main/{name}", FILES[name]
        size = len(data)
        assert fetch(url) == (200, data, None)
        assert fetch(url, Range="bytes=2-4") == (206, data[2:5], f"bytes 2-4/{size}")
        assert fetch(url, Range="bytes=3-") == (206, data[3:], f"bytes 3-{size - 1}/{size}")
        assert fetch(url, Range="bytes=-3") == (206, data[-3:], f"bytes {size - 3}-{size - 1}/{size}")
        assert fetch(url, Range=f"bytes={size}-") == (416, b"", f"bytes */{size}")


def test_the_second_origin_refuses_a_token(hub: HubServer) -> None:
    hub.add_repo(REPO, FILES)
    hf_hub_download(REPO, "model.safetensors")
    blob = next(request.line for request in hub.log if hub.cdn_url in request.line).split()[1]
    assert fetch(blob)[0] == 200
    assert fetch(blob, Authorization=f"Bearer {TOKEN}")[0] == 400


def test_requests_and_bytes_are_counted(hub: HubServer) -> None:
    hub.add_repo(REPO, FILES)
    for _ in range(2):  # the second time from the cache, after a HEAD
        hf_hub_download(REPO, "model.safetensors")
    assert hub.count("/resolve/main/model.safetensors") == 2
    assert hub.count(f"GET {hub.cdn_url}") == 1
    assert hub.bytes_served(hub.cdn_url) == len(WEIGHTS)


# Pushing


def test_what_was_pushed_is_pulled(hub: HubServer, api: HfApi, folder: Path) -> None:
    url = api.create_repo(REPO)
    assert (url, url.repo_id) == (f"{hub.url}/{REPO}", REPO)
    info = api.upload_folder(repo_id=REPO, folder_path=folder, commit_message="All at once")
    pushed = hub.files(REPO)
    assert FILES.items() <= pushed.items()
    assert set(pushed) - set(FILES) == {".gitattributes"}
    assert [commit.title for commit in hub.history(REPO)] == ["All at once", "initial commit"]
    assert hub.history(REPO)[0].sha == info.oid
    assert hub.count(f"PUT {hub.cdn_url}") == 2  # the weights and the plot; the rest is in git
    for revision in (None, "main", info.oid):
        assert read(snapshot_download(REPO, revision=revision)) == pushed


def test_model_info_has_sizes_and_hashes(hub: HubServer, api: HfApi) -> None:
    sha = hub.add_repo(REPO, FILES | {"README.md": b"---\nlicense: mit\ntags: [x]\n---\n# Hello\n"})
    info = api.model_info(REPO, files_metadata=True)
    assert (info.sha, info.private, info.card_data["license"], info.tags) == (sha, False, "mit", ["x"])
    siblings = {sibling.rfilename: sibling for sibling in info.siblings}
    assert siblings["config.json"].lfs is None
    assert siblings["config.json"].blob_id == git_hash("config.json")
    assert siblings["model.safetensors"].lfs.size == siblings["model.safetensors"].size == len(WEIGHTS)
    assert api.model_info(REPO, revision=sha).siblings[0].size is None
    assert ModelCard.load(REPO).data.license == "mit"


def git_hash(name: str) -> str:
    command = ["git", "hash-object", "--stdin"]
    return subprocess.run(command, input=FILES[name], capture_output=True, check=True).stdout.decode().strip()


def test_unchanged_content_makes_no_commit(hub: HubServer, api: HfApi, folder: Path) -> None:
    sha = hub.add_repo(REPO, folder)
    info = api.upload_folder(repo_id=REPO, folder_path=folder)
    assert info.oid == sha
    assert (hub.count("/commit/"), len(hub.history(REPO))) == (0, 1)
    # A change to one file sends that one.
    (folder / "config.json").write_bytes(b"{}")
    api.upload_folder(repo_id=REPO, folder_path=folder)
    assert (hub.count("/commit/"), hub.count("PUT")) == (1, 0)
    assert hub.files(REPO) == FILES | {"config.json": b"{}"}


def test_names_beyond_ascii_are_kept(hub: HubServer, api: HfApi) -> None:
    files = {"λ = 0.5/τ & co.json": b"{}", "λ = 0.5/%41.bin": b"1"}
    api.create_repo(REPO)
    for path, data in files.items():
        api.upload_file(repo_id=REPO, path_or_fileobj=data, path_in_repo=path)
        assert Path(hf_hub_download(REPO, path)).read_bytes() == data
    assert {entry.path for entry in api.list_repo_tree(REPO, "λ = 0.5")} == set(files)
    with pytest.raises(EntryNotFoundError):
        api.delete_file("Δ", REPO)


def test_a_commit_deletes_files_and_earlier_commits_keep_them(hub: HubServer, api: HfApi) -> None:
    before = hub.add_repo(REPO, FILES)
    gone = [CommitOperationDelete("config.json"), CommitOperationDelete("plots/")]
    api.create_commit(REPO, gone, commit_message="Less")
    assert set(hub.files(REPO)) == {"empty", "model.safetensors"}
    assert hub.files(REPO, before) == FILES  # a commit never changes
    with pytest.raises(EntryNotFoundError, match="doesn't exist"):
        api.create_commit(REPO, [CommitOperationDelete("config.json")], commit_message="Again")


def test_branches_tags_and_pull_requests_have_contents_of_their_own(hub: HubServer, api: HfApi) -> None:
    first = hub.add_repo(REPO, {"a": b"1"})
    api.create_branch(REPO, branch="feature/x")
    api.create_tag(REPO, tag="v1")
    api.upload_file(repo_id=REPO, path_or_fileobj=b"2", path_in_repo="a", revision="feature/x")
    pull = api.upload_file(repo_id=REPO, path_or_fileobj=b"3", path_in_repo="a", create_pr=True)
    assert pull.pr_revision == "refs/pr/1"
    api.upload_file(repo_id=REPO, path_or_fileobj=b"4", path_in_repo="a", revision="refs/pr/1")
    for revision, content in {"main": b"1", "v1": b"1", "feature/x": b"2", "refs/pr/1": b"4"}.items():
        assert Path(hf_hub_download(REPO, "a", revision=revision)).read_bytes() == content
    refs = api.list_repo_refs(REPO, include_pull_requests=True)
    assert [ref.name for ref in refs.branches] == ["main", "feature/x"]
    assert [(ref.name, ref.target_commit) for ref in refs.tags] == [("v1", first)]
    assert [ref.ref for ref in refs.pull_requests] == ["refs/pr/1"]
    for create in (
        lambda: api.create_branch(REPO, branch="feature/x"),
        lambda: api.create_tag(REPO, tag="v1"),
    ):
        with pytest.raises(HfHubHTTPError) as error:
            create()
        assert status_of(error) == 409
    with pytest.raises(HfHubHTTPError) as error:
        api.upload_file(repo_id=REPO, path_or_fileobj=b"5", path_in_repo="a", revision="v1")
    assert status_of(error) == 400


def test_a_card_is_checked(hub: HubServer, api: HfApi) -> None:
    api.create_repo(REPO)
    for metadata in (b"base_model: /home/someone/model", b"a: [", b"- a list"):
        with pytest.raises(ValueError, match="Invalid metadata"):
            card = b"---\n" + metadata + b"\n---\n"
            api.upload_file(repo_id=REPO, path_or_fileobj=card, path_in_repo="README.md")
    with pytest.warns(UserWarning, match="empty or missing yaml"):
        api.upload_file(repo_id=REPO, path_or_fileobj=b"# Hello", path_in_repo="README.md")
    assert hub.count("/commit/") == 1


def test_folders_and_paths_are_listed(hub: HubServer, api: HfApi) -> None:
    hub.add_repo(REPO, FILES)
    assert {entry.path for entry in api.list_repo_tree(REPO)} == {
        "config.json",
        "empty",
        "model.safetensors",
        "plots",
    }
    assert [entry.path for entry in api.list_repo_tree(REPO, "plots")] == ["plots/sweep.png"]
    assert [entry.path for entry in api.get_paths_info(REPO, ["plots", "config.json", "no"])] == [
        "config.json",
        "plots",
    ]
    assert set(api.list_repo_files(REPO)) == set(FILES)
    with pytest.raises(EntryNotFoundError):
        list(api.list_repo_tree(REPO, "no"))


# Refusals


def test_what_is_not_there_has_the_clients_own_error(hub: HubServer, api: HfApi) -> None:
    hub.add_repo(REPO, FILES)
    for repo_id in ("me/none", "none"):
        with pytest.raises(RepositoryNotFoundError):
            api.model_info(repo_id)
        with pytest.raises(RepositoryNotFoundError):
            hf_hub_download(repo_id, "config.json")
    with pytest.raises(RepositoryNotFoundError):  # a model is not a data set
        api.dataset_info(REPO)
    for revision in ("none", "0" * 40):
        with pytest.raises(RevisionNotFoundError):
            hf_hub_download(REPO, "config.json", revision=revision)
    with pytest.raises(EntryNotFoundError):
        hf_hub_download(REPO, "none.json")
    with pytest.raises(RepositoryNotFoundError):
        api.upload_file(repo_id="me/none", path_or_fileobj=b"", path_in_repo="a")


def test_a_repository_that_exists_is_not_made_again(hub: HubServer, api: HfApi) -> None:
    api.create_repo(REPO)
    with pytest.raises(HfHubHTTPError) as error:
        api.create_repo(REPO)
    assert status_of(error) == 409
    assert api.create_repo(REPO, exist_ok=True).repo_id == REPO
    assert api.create_repo(REPO, repo_type="dataset").repo_type == "dataset"


def test_a_commit_on_an_old_parent_is_refused(hub: HubServer, api: HfApi) -> None:
    old = hub.add_repo(REPO, {"a": b"1"})
    add = {"path_or_fileobj": b"2", "path_in_repo": "a", "repo_id": REPO, "parent_commit": old}
    new = api.upload_file(**add).oid
    with pytest.raises(HfHubHTTPError) as error:
        api.upload_file(**add | {"path_or_fileobj": b"3"})
    assert status_of(error) == 412
    assert hub.history(REPO)[0].sha == new
    assert hub.files(REPO) == {"a": b"2"}


@pytest.mark.parametrize(("token", "status"), [(False, 401), (OTHER_TOKEN, 404), ("hf_wrong", 401)])
def test_a_private_repository_is_hidden_from_others(hub: HubServer, api: HfApi, token: str | bool, status: int) -> None:
    api.create_repo(REPO, private=True)
    assert api.model_info(REPO).private
    with pytest.raises(HfHubHTTPError) as error:
        api.model_info(REPO, token=token)
    assert status_of(error) == status


@pytest.mark.parametrize(("token", "status"), [(False, 401), (OTHER_TOKEN, 403)])
def test_a_gated_repository_shows_its_card_but_not_its_files(
    hub: HubServer, api: HfApi, token: str | bool, status: int
) -> None:
    hub.add_repo(REPO, FILES, gated=True)
    assert api.model_info(REPO, token=token).gated == "manual"  # everyone may look, only the files are kept back
    with pytest.raises(GatedRepoError) as error:
        hf_hub_download(REPO, "config.json", token=token)
    assert status_of(error) == status
    assert Path(hf_hub_download(REPO, "config.json")).read_bytes() == FILES["config.json"]


@pytest.mark.parametrize(("token", "status"), [(False, 401), (OTHER_TOKEN, 403), ("hf_wrong", 401)])
def test_nobody_writes_without_the_right_to(hub: HubServer, api: HfApi, token: str | bool, status: int) -> None:
    hub.add_repo(REPO, {"a": b"1"})
    with pytest.raises(HfHubHTTPError) as error:
        api.upload_file(repo_id=REPO, path_or_fileobj=b"2", path_in_repo="a", token=token)
    assert status_of(error) == status
    with pytest.raises(HfHubHTTPError) as error:
        api.create_repo("me/new", token=token)
    assert status_of(error) == status
    assert hub.files(REPO) == {"a": b"1"}


# Faults


def test_the_client_tries_again_after_a_500(hub: HubServer, api: HfApi, folder: Path) -> None:
    api.create_repo(REPO)
    hub.fail_next("/preupload/")
    api.upload_folder(repo_id=REPO, folder_path=folder)
    assert [request.status for request in hub.log if "/preupload/" in request.line] == [500, 200]
    assert hub.files(REPO)["model.safetensors"] == WEIGHTS


def test_a_commit_that_fails_leaves_nothing_and_the_next_try_resumes(hub: HubServer, api: HfApi, folder: Path) -> None:
    api.create_repo(REPO)
    hub.fail_next("/commit/", status=503)  # the one request that the client does not repeat by itself
    with pytest.raises(HfHubHTTPError) as error:
        api.upload_folder(repo_id=REPO, folder_path=folder)
    assert status_of(error) == 503
    assert set(hub.files(REPO)) == {".gitattributes"}
    uploads = hub.count("PUT")
    api.upload_folder(repo_id=REPO, folder_path=folder)
    assert hub.count("PUT") == uploads == 2  # LFS content of the first try was kept
    assert FILES.items() <= hub.files(REPO).items()


def test_an_upload_that_is_dropped_is_sent_again(hub: HubServer, api: HfApi) -> None:
    api.create_repo(REPO)
    hub.drop_next_upload(after_bytes=100_000)
    api.upload_file(repo_id=REPO, path_or_fileobj=WEIGHTS, path_in_repo="model.safetensors")
    assert hub.files(REPO)["model.safetensors"] == WEIGHTS
    uploads = [(request.status, request.received) for request in hub.log if "PUT" in request.line]
    assert uploads == [(0, 100_000), (200, len(WEIGHTS))]


def test_a_download_that_is_dropped_is_resumed(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 50_000)  # 10 MiB, of which it keeps whole ones only
    hub.add_repo(REPO, FILES)
    hub.drop_next_download(f"GET {hub.cdn_url}", after_bytes=100_000)
    assert Path(hf_hub_download(REPO, "model.safetensors")).read_bytes() == WEIGHTS
    assert [request.status for request in hub.log if hub.cdn_url in request.line] == [200, 206]
    assert hub.bytes_served(hub.cdn_url) == len(WEIGHTS)


def test_uploaded_content_must_have_its_hash(hub: HubServer, api: HfApi) -> None:
    api.create_repo(REPO)
    url = f"{hub.cdn_url}/models/{REPO}/{'0' * 64}"
    with pytest.raises(urllib.error.HTTPError, match="400"):
        urllib.request.urlopen(urllib.request.Request(url, data=b"x", method="PUT"))


def test_requests_that_make_no_sense_are_refused(hub: HubServer) -> None:
    hub.add_repo(REPO, FILES)
    commit = f"{hub.url}/api/models/{REPO}/commit/main"
    header = b'{"key": "header", "value": {"summary": "x", "description": ""}}\n'
    nothing = b'{"key": "lfsFile", "value": {"path": "a", "oid": "%s"}}' % (b"0" * 64)
    for url, body, status in [
        (commit, header + nothing, 400),  # a pointer to LFS content that was not uploaded
        (commit, header + b'{"key": "fold", "value": {"path": "a"}}', 400),
        (commit, b"not json", 400),
        (f"{hub.url}/api/no/such/route", b"", 404),
    ]:
        assert fetch(url, body, Authorization=f"Bearer {TOKEN}")[0] == status
    assert len(hub.history(REPO)) == 1


# The libraries on top


def assert_same_weights(one: torch.nn.Module, other: torch.nn.Module) -> None:
    ours, theirs = one.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_transformers_loads_what_it_pushed(hub: HubServer, model: GPT2LMHeadModel) -> None:
    model.push_to_hub(REPO, private=True, create_pr=True)
    assert {"config.json", "model.safetensors"} <= set(hub.files(REPO, "refs/pr/1"))
    assert set(hub.files(REPO)) == {".gitattributes"}
    assert_same_weights(AutoModelForCausalLM.from_pretrained(REPO, revision="refs/pr/1"), model)
    model.push_to_hub(REPO)
    sha = hub.history(REPO)[0].sha
    for revision in ("main", sha):
        assert_same_weights(AutoModelForCausalLM.from_pretrained(REPO, revision=revision), model)


def test_peft_loads_an_adapter_and_its_base(hub: HubServer, model: GPT2LMHeadModel, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "base")
    hub.add_repo("me/base", tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained("me/base")
    adapted = get_peft_model(
        base, LoraConfig(r=2, target_modules=["c_attn"], init_lora_weights=False, fan_in_fan_out=True)
    )
    adapted.save_pretrained(tmp_path / "adapter")
    HfApi().create_repo("me/adapter")
    HfApi().upload_folder(repo_id="me/adapter", folder_path=tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("me/base"), "me/adapter")
    assert_same_weights(loaded, adapted)
    # transformers finds the base by the name that the adapter's config has.
    tokens = torch.arange(8)[None]
    assert torch.equal(AutoModelForCausalLM.from_pretrained("me/adapter")(tokens).logits, adapted(tokens).logits)


def test_datasets_loads_text_and_parquet(hub: HubServer, tmp_path: Path) -> None:
    hub.add_repo("me/text", {"train.txt": b"one\ntwo\n", "test.txt": b"three\n"}, repo_type="dataset")
    text = load_dataset("me/text")
    assert (text["train"]["text"][:], text["test"]["text"][:]) == (["one", "two"], ["three"])

    text["train"].to_parquet(tmp_path / "train.parquet")
    data = (tmp_path / "train.parquet").read_bytes()
    sha = hub.add_repo("me/parquet", {"data/train.parquet": data}, repo_type="dataset")
    hub.add_repo("me/parquet", {"README.md": b"# Nothing left\n"}, repo_type="dataset")
    assert load_dataset("me/parquet", revision=sha, split="train")["text"][:] == ["one", "two"]
    assert hub.bytes_served(hub.cdn_url) >= len(data)


def test_datasets_loads_what_it_pushed(hub: HubServer) -> None:
    hub.add_repo("me/text", {"train.txt": b"one\ntwo\n"}, repo_type="dataset")
    load_dataset("me/text", split="train").push_to_hub("me/pushed")
    assert load_dataset("me/pushed", split="train")["text"][:] == ["one", "two"]
