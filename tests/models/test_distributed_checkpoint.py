"""Checkpoints that torch.distributed.checkpoint wrote: read as they are, in parts, and nothing of a pickle is run."""

import io
import os
import pickle
import random
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support import launch, tiny_models
from support.tiny_models import Pair, TinyModels
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import get_state_dict
from transformers import AutoModelForCausalLM

from hf_taskvec import TaskVector
from hf_taskvec.algebra.sums import Sum
from hf_taskvec.errors import CorruptFileError, MissingFileError, TaskVectorError, UnsupportedError
from hf_taskvec.models.checkpoint import open_checkpoint
from hf_taskvec.models.distributed_checkpoint import open_distributed

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def write(tuned: Path, folder: Path, **parts: object) -> Path:
    model = AutoModelForCausalLM.from_pretrained(tuned)
    dcp.save({"model": model.state_dict(), **parts}, checkpoint_id=folder)
    model.config.save_pretrained(folder)
    return folder


def write_safetensors(tuned: Path, folder: Path) -> Path:
    model = AutoModelForCausalLM.from_pretrained(tuned)
    writer = HuggingFaceStorageWriter(path=str(folder), save_distributed=True, enable_consolidation=False)
    dcp.save(model.state_dict(), storage_writer=writer)
    model.config.save_pretrained(folder)
    return folder


def same(folder: Path, other: Path) -> bool:
    one, two = open_checkpoint(folder).tensors, open_checkpoint(other).tensors
    return one.keys() == two.keys() and all(torch.equal(one[name].read(), two[name].read()) for name in one)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "phi"])
def test_a_distributed_checkpoint_is_a_model_like_any_other(
    models: TinyModels, tmp_path: Path, architecture: str
) -> None:
    pair = models.pair(architecture)
    model = AutoModelForCausalLM.from_pretrained(pair.tuned)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
    optimizer.step()
    _, state = get_state_dict(model, optimizer)
    folder = write(pair.tuned, tmp_path / "tuned", optim=state, step=3)
    assert same(folder, pair.tuned)
    vector, expected = TaskVector.from_finetuned(pair.base, folder), pair.vector()
    for base in (pair.base, write(pair.base, tmp_path / "base")):  # as what is applied to, too
        found, reference = (v.apply(base, tmp_path / "out", scale=-0.6, overwrite=True) for v in (vector, expected))
        assert same(found, reference)
    assert (
        open_checkpoint(vector.apply(pair.base, tmp_path / "one")).full_digest
        == open_checkpoint(pair.tuned).full_digest
    )
    assert vector.save(tmp_path / "saved") and TaskVector.load(tmp_path / "saved").norm() == expected.norm()


def test_a_low_rank_change_has_one_result_on_every_kind_of_file(tmp_path: Path) -> None:
    """In bf16 at a rank where fp32 is enough: which precision is taken must not hang on how the base is stored."""
    base = tiny_models.make("llama", torch.bfloat16, hidden_size=256, intermediate_size=512, vocab_size=200)
    base.save_pretrained(tmp_path / "base")
    folder = write(tmp_path / "base", tmp_path / "parts")
    vector = tiny_models.low_rank(base, size=0.03)
    with pytest.MonkeyPatch.context() as patched:
        taken: list[bool] = []
        real = Sum._fits_single
        patched.setattr(Sum, "_fits_single", lambda *given: taken.append(real(*given)) or taken[-1])
        applied = [
            vector.apply(each, tmp_path / f"{each.name}-out", scale=-0.7) for each in (tmp_path / "base", folder)
        ]
    half = len(taken) // 2
    assert same(*applied) and sum(taken[:half]) == sum(taken[half:]) > 0


def test_parts_of_several_processes_are_read_without_putting_them_together(tmp_path: Path) -> None:
    base = tiny_models.make("llama", num_attention_heads=4, num_key_value_heads=4)
    pair = tiny_models.save_pair(tmp_path, base, tiny_models.tuned_copy(base))
    launch.succeed(launch.SUPPORT / "launched_distributed_checkpoint.py", tmp_path, processes=4)
    for way in ("rows", "columns", "both", "safetensors"):
        assert len([*(tmp_path / way).glob("*.distcp"), *(tmp_path / way).glob("shard-*")]) == 4, way
        assert same(tmp_path / way, pair.tuned), way
        found = TaskVector.from_finetuned(pair.base, tmp_path / way).apply(
            pair.base, tmp_path / f"{way}-out", scale=0.3
        )
        assert same(found, pair.vector().apply(pair.base, tmp_path / "plain", scale=0.3, overwrite=True)), way
    # Where accelerate and Trainer put it: checkpoint-N/pytorch_model_fsdp_0, the config above it.
    (tmp_path / "checkpoint-7").mkdir()
    (tmp_path / "rows" / "config.json").rename(tmp_path / "checkpoint-7" / "config.json")
    (tmp_path / "rows").rename(tmp_path / "checkpoint-7" / "pytorch_model_fsdp_0")
    assert same(tmp_path / "checkpoint-7", pair.tuned)
    assert same(tmp_path / "checkpoint-7" / "pytorch_model_fsdp_0", pair.tuned)


@pytest.fixture
def stored(models: TinyModels, tmp_path: Path) -> tuple[Pair, Path]:
    pair = models.pair("llama")
    return pair, write(pair.tuned, tmp_path / "tuned")


class Harm:
    """What a pickle may hold."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


def test_no_pickle_is_run(stored: tuple[Pair, Path], tmp_path: Path) -> None:
    _, folder = stored
    harm = tmp_path / "harm"
    original = pickle.loads((folder / ".metadata").read_bytes())
    original.planner_data = Harm(harm)
    (folder / ".metadata").write_bytes(pickle.dumps(original))
    with pytest.raises(CorruptFileError, match=r"names posix\.mkdir.*Nothing of it was run"):
        open_checkpoint(folder)
    assert not harm.exists()
    # In the files of the parts as well.
    original.planner_data = None
    (folder / ".metadata").write_bytes(pickle.dumps(original))
    evil = io.BytesIO()
    torch.save(Harm(harm), evil)
    for index, info in list(original.storage_data.items()):
        if index.fqn == "model.model.norm.weight":
            info.relative_path, info.offset, info.length = "evil.distcp", 0, len(evil.getvalue())
    (folder / "evil.distcp").write_bytes(evil.getvalue())
    (folder / ".metadata").write_bytes(pickle.dumps(original))
    with pytest.raises(CorruptFileError, match="damaged or no plain tensor"):
        open_distributed(folder)["model.norm.weight"].read()
    assert not harm.exists()


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("outside", "outside of its folder"),
        ("missing", r"lacks other\.distcp"),
        ("gap", "do not make a whole tensor"),
        ("short", "shorter than the index says"),
        ("shape", r"norm\.weight at .* is damaged"),
        ("cut", "is damaged, or no index"),
    ],
)
def test_a_damaged_index_is_refused_by_name(stored: tuple[Pair, Path], what: str, words: str) -> None:
    _, folder = stored
    index = pickle.loads((folder / ".metadata").read_bytes())
    name = "model.model.norm.weight"
    (info,) = (each for key, each in index.storage_data.items() if key.fqn == name)
    (chunk,) = index.state_dict_metadata[name].chunks
    if what == "outside":
        info.relative_path = "../other.distcp"
    elif what == "missing":
        info.relative_path = "other.distcp"
    elif what == "gap":
        chunk.sizes = torch.Size([15])
    elif what == "short":
        info.offset = 10**9
    elif what == "shape":
        index.state_dict_metadata[name].size, chunk.sizes = torch.Size([17]), torch.Size([17])
    data = pickle.dumps(index)
    (folder / ".metadata").write_bytes(data[: len(data) // 2] if what == "cut" else data)
    with pytest.raises(TaskVectorError, match=words):
        [source.read() for source in open_distributed(folder).values()]


@pytest.mark.parametrize("way", ["torch", "safetensors"])
def test_random_damage_is_refused_or_read(stored: tuple[Pair, Path], tmp_path: Path, way: str) -> None:
    """Nothing but an error of ours, whatever byte of index or parts is changed."""
    pair, folder = stored
    if way == "safetensors":
        folder = write_safetensors(pair.tuned, tmp_path / "safetensors")
    draw = random.Random(0)
    files = [path for path in folder.iterdir() if path.name != "config.json"]
    refused = 0
    for number in range(120):
        path = files[number % len(files)]
        valid = path.read_bytes()
        damaged = bytearray(valid)
        reach = len(damaged) if path.name == ".metadata" else min(len(damaged), 4000)  # behind are mostly elements
        for _ in range(draw.randint(1, 4)):
            damaged[draw.randrange(reach)] = draw.randrange(256)
        path.write_bytes(bytes(damaged) if number % 5 else bytes(damaged[: draw.randrange(len(damaged))]))
        try:
            [source.read() for source in open_distributed(folder).values()]
        except TaskVectorError:
            refused += 1
        finally:
            path.write_bytes(valid)
    assert refused > 40
    assert same(folder, pair.tuned)


def test_what_is_missing_is_named(stored: tuple[Pair, Path], tmp_path: Path) -> None:
    _, folder = stored
    (folder / "config.json").unlink()
    with pytest.raises(MissingFileError, match=r"config\.save_pretrained"):
        open_checkpoint(folder)
    zero = tmp_path / "zero"
    (zero / "global_step3").mkdir(parents=True)
    (zero / "latest").write_text("global_step3")
    (zero / "global_step3" / "zero_pp_rank_0_mp_rank_00_optim_states.pt").write_bytes(b"")
    with pytest.raises(UnsupportedError, match=r"convert_deepspeed.*zero_to_fp32\.py \. weights --safe_serialization"):
        open_checkpoint(zero)


def test_transformers_own_form_in_one_process(models: TinyModels, tmp_path: Path) -> None:
    pair = models.pair("llama")
    assert same(write_safetensors(pair.tuned, tmp_path / "written"), pair.tuned)
