"""A vector streamed into a checkpoint: exact, complete, atomic, the same on any number of threads and processes."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import warnings
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from support import launch, tiny_models
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from hf_taskvec import TaskVector
from hf_taskvec.errors import BadValueError, ChangedSourceError, MismatchError, OutputError


def weights(folder: Path) -> dict[str, bytes]:
    """The bytes of every weight file."""
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.safetensors"))}


def stored(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    return found


def bits_differ(a: torch.Tensor, b: torch.Tensor) -> int:
    kind = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return int((a.view(kind) != b.view(kind)).sum())


@pytest.mark.parametrize("dtype", tiny_models.DTYPES)
@pytest.mark.parametrize("architecture", tiny_models.ARCHITECTURES)
def test_applying_at_one_gives_the_fine_tune(models, tmp_path, architecture, dtype):
    pair = models.pair(architecture, dtype)
    pair.vector().apply(pair.base, tmp_path / "out")
    expected, found = stored(pair.tuned), stored(tmp_path / "out")
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("dtype", tiny_models.DTYPES)
@pytest.mark.parametrize("scale", [-1.0, 1.0])
def test_a_dense_result_is_correctly_rounded(tmp_path, dtype, scale):
    """On the vector's own base and on another model: no element differs from fp64 rounded once."""
    torch.manual_seed(0)
    base = tiny_models.make("phi", dtype, hidden_size=128, intermediate_size=512, vocab_size=1000)
    tuned = tiny_models.tuned_copy(base, 0.003)
    other = tiny_models.tuned_copy(base, 0.002, seed=7)
    pair = tiny_models.save_pair(tmp_path, base, tuned)
    other.save_pretrained(tmp_path / "other")
    vector = pair.vector()
    for target in (pair.base, tmp_path / "other"):
        vector.apply(target, tmp_path / "out", scale=scale, overwrite=True)
        found, old, new, on = (stored(f) for f in (tmp_path / "out", pair.base, pair.tuned, target))
        for name in old:
            exact = on[name].double() + scale * (new[name].double() - old[name].double())
            assert bits_differ(found[name], tiny_models.nearest(exact, dtype)) == 0, name


@pytest.mark.parametrize(("dtype", "most"), [(torch.bfloat16, 1e-4), (torch.float16, 5e-4)])
def test_other_scales_and_factors_are_rarely_off(tmp_path, dtype, most):
    torch.manual_seed(0)
    base = tiny_models.make("phi", dtype, hidden_size=128, intermediate_size=512, vocab_size=1000)
    pair = tiny_models.save_pair(tmp_path, base, tiny_models.tuned_copy(base, 0.003))
    factors = {
        n: (torch.randn(s.shape[0], 8) * 0.02, torch.randn(8, s.shape[1]))
        for n, s in tiny_models.tensors(pair.base).items()
        if len(s.shape) == 2
    }
    for vector in (pair.vector(), TaskVector.from_tensors(factors)):
        vector.apply(pair.base, tmp_path / "out", scale=-0.6, overwrite=True)
        found, old = stored(tmp_path / "out"), stored(pair.base)
        wrong = total = 0
        for name in vector:
            exact = old[name].double() - 0.6 * vector.dense(name, "float64")
            wrong += bits_differ(found[name], tiny_models.nearest(exact, dtype))
            total += exact.numel()
        assert wrong / total < most


@contextmanager
def transformers_warnings(caplog):
    """A block in which `caplog` records the warnings of transformers, which are switched off in other tests."""
    level, logger = logging.get_verbosity(), logging.get_logger("transformers")
    logging.set_verbosity_warning()
    logger.addHandler(caplog.handler)
    try:
        yield
    finally:
        logger.removeHandler(caplog.handler)
        logging.set_verbosity(level)


def test_the_folder_is_complete_and_loads_without_a_warning(models, tmp_path, caplog):
    pair = models.pair("llama")
    from tokenizers import Tokenizer
    from tokenizers import models as tokenizer_models
    from transformers import PreTrainedTokenizerFast

    words = {"<unk>": 0, **{f"w{n}": n for n in range(1, 20)}}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(tokenizer_models.WordLevel(words, unk_token="<unk>")), unk_token="<unk>"
    )
    tokenizer.chat_template = "{{ messages }}"
    base = tmp_path / "base"
    AutoModelForCausalLM.from_pretrained(pair.base).save_pretrained(base)
    tokenizer.save_pretrained(base)
    (base / "README.md").write_text("the base's card")
    out = pair.vector().apply(base, tmp_path / "out", scale=-0.5)
    with warnings.catch_warnings(), transformers_warnings(caplog):
        warnings.simplefilter("error")
        model = AutoModelForCausalLM.from_pretrained(out)
        again = AutoTokenizer.from_pretrained(out)
    assert not caplog.records
    with transformers_warnings(caplog):  # a warning would be recorded
        AutoModelForCausalLM.from_pretrained(out, num_hidden_layers=3)
    assert "layers.2" in caplog.text
    assert model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=3, min_new_tokens=3).shape == (1, 6)
    assert again.chat_template == tokenizer.chat_template
    assert again.get_vocab() == tokenizer.get_vocab()
    assert (out / "generation_config.json").exists()
    assert not (out / "README.md").exists()  # the base's card does not describe the result
    record = json.loads((out / "taskvec_apply.json").read_text())
    assert record["vector"]["expression"] == "-0.5*tuned"
    assert str(tmp_path) not in (out / "taskvec_apply.json").read_text()


def test_only_what_belongs_to_a_model_is_copied(models, tmp_path):
    pair = models.pair("llama")
    base = tmp_path / "base"
    shutil.copytree(pair.base, base)
    belongs = ["vocab.txt", "merges.txt", "tokenizer.model", "tokenizer.model.v3", "LICENSE.txt"]
    for name in [*belongs, "code.py", "credentials.json", "notes.txt", "requirements.txt", "optimizer.pt"]:
        (base / name).write_text(name)
    out = pair.vector().apply(base, tmp_path / "out")
    ours = {"model.safetensors", "config.json", "generation_config.json", "taskvec_apply.json"}
    assert {path.name for path in out.iterdir()} == {*belongs, *ours}


def test_a_base_without_a_config_gets_none(models, tmp_path):
    pair = models.pair("llama", torch.bfloat16)
    base = tmp_path / "base"
    base.mkdir()
    shutil.copy(pair.base / "model.safetensors", base)
    out = pair.vector().apply(base, tmp_path / "out", dtype="float32")
    assert not (out / "config.json").exists()
    assert {tensor.dtype for tensor in stored(out).values()} == {torch.float32}


def test_dtype_and_size_of_shards_can_be_chosen(models, tmp_path):
    pair = models.pair("phi", torch.bfloat16)
    out = pair.vector().apply(pair.base, tmp_path / "out", dtype="float32", max_shard_size="10KB")
    assert len(list(out.glob("model-*.safetensors"))) > 1
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.dtype == torch.float32
    tuned = AutoModelForCausalLM.from_pretrained(pair.tuned)
    assert all(torch.equal(a, b.float()) for a, b in zip(model.parameters(), tuned.parameters(), strict=True))


def test_a_base_of_pickled_weights_is_written_as_safetensors(models, tmp_path):
    """Read from `pytorch_model.bin`, written as safetensors, with the same numbers."""
    pair = models.pair("phi", torch.bfloat16)
    base = tmp_path / "base"
    base.mkdir()
    shutil.copy(pair.base / "config.json", base)
    torch.save(stored(pair.base), base / "pytorch_model.bin")
    expected = stored(pair.vector().apply(pair.base, tmp_path / "expected", scale=-0.3))
    for number, options in enumerate(({}, {"max_shard_size": "10KB"})):
        out = pair.vector().apply(base, tmp_path / f"out{number}", scale=-0.3, **options)
        found = stored(out)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert not list(out.glob("*.bin*"))
        AutoModelForCausalLM.from_pretrained(out)


def test_a_progress_bar_is_shown_when_asked_for(models, tmp_path, capfd):
    pair = models.pair("llama")
    size = sum(tensor.nbytes for tensor in stored(pair.base).values())
    for progress in (None, False):  # None: on a terminal, which this is not
        pair.vector().apply(pair.base, tmp_path / "out", progress=progress, overwrite=True)
    assert "Applying" not in capfd.readouterr().err
    pair.vector().apply(pair.base, tmp_path / "out", progress=True, overwrite=True)
    shown = capfd.readouterr().err
    assert re.search(rf"Applying: 100%.*{size / 1000:.1f}k/{size / 1000:.1f}k .*B/s", shown), shown


def test_the_hubs_gpt2_keeps_its_names_and_buffers(models, tmp_path):
    """No prefix, and causal masks among the tensors: both stay as the base stores them."""
    from safetensors.torch import save_file

    pair = models.pair("gpt2")
    old = stored(pair.base)
    plain = {name.removeprefix("transformer."): tensor for name, tensor in old.items()}
    masks = {f"h.{n}.attn.bias": torch.ones(1, 1, 4, 4, dtype=torch.bool).tril() for n in range(2)}
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "config.json").write_text((pair.base / "config.json").read_text())
    save_file({**plain, **masks}, tmp_path / "hub" / "model.safetensors", {"format": "pt"})
    out = pair.vector().apply(tmp_path / "hub", tmp_path / "out")
    found = stored(out)
    assert found.keys() == {**plain, **masks}.keys()
    assert all(torch.equal(found[name], masks[name]) for name in masks)
    tuned = AutoModelForCausalLM.from_pretrained(pair.tuned)
    result = AutoModelForCausalLM.from_pretrained(out)
    assert all(torch.equal(a, b) for a, b in zip(result.parameters(), tuned.parameters(), strict=True))


def test_threads_do_not_change_the_bytes(models, tmp_path):
    pair = models.pair("phi", torch.bfloat16)
    vector = -0.3 * pair.vector()
    results = [weights(vector.apply(pair.base, tmp_path / f"out{n}", threads=n)) for n in (1, 2, 5)]
    assert results[0] == results[1] == results[2]


_LAUNCHED = """
import sys
from hf_taskvec import TaskVector
base, tuned, out = sys.argv[1:]
TaskVector.from_finetuned(base, tuned).apply(base, out, scale=-0.3, max_shard_size="10KB")
"""


_DYING = """
import os, signal, sys, threading, time
sys.argv, where = sys.argv[:-1], sys.argv[-1]
if os.environ["RANK"] == "1":
    import hf_taskvec.application.checkpoint_writing as writing
    written, real = [], writing._write_tiles
    def die(task):
        written.append(1)
        if len(written) > 12:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(task)
    writing._write_tiles = die
"""


def test_a_process_that_dies_stops_the_others_and_the_next_run_resumes(models, tmp_path):
    pair, script, dying = models.pair("phi", torch.bfloat16), tmp_path / "script.py", tmp_path / "dying.py"
    script.write_text(_LAUNCHED)
    dying.write_text(_DYING + _LAUNCHED)
    said = tmp_path / "said"
    run = launch.start(dying, pair.base, pair.tuned, tmp_path / "out", "x", processes=2, stderr=said)
    first, second = run.processes
    second.join(120)
    died = time.monotonic()
    first.join(60)  # by itself: nobody ends it
    assert second.exitcode == -9 and first.exitcode not in (0, None) and time.monotonic() - died < 60
    assert "another process of this run has ended" in said.read_text() and not (tmp_path / "out").exists()
    launch.succeed(script, pair.base, pair.tuned, tmp_path / "out", processes=2)
    launch.succeed(script, pair.base, pair.tuned, tmp_path / "one")
    assert weights(tmp_path / "out") == weights(tmp_path / "one")


def test_two_hosts_that_share_a_folder_write_the_same_bytes_as_one(models, tmp_path):
    """`accelerate launch --num_machines 2`, each with temporary files of its own and, if that is allowed, memory."""
    pair, script = models.pair("phi", torch.bfloat16), tmp_path / "script.py"
    script.write_text(_LAUNCHED)
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    apart = (
        ["unshare", "--ipc"]
        if subprocess.run(["unshare", "--ipc", "true"], capture_output=True).returncode == 0
        else []
    )
    hosts = []
    for rank in (0, 1):
        own = tmp_path / f"host{rank}"
        own.mkdir()
        options = f"--multi_gpu --num_processes 2 --num_machines 2 --machine_rank {rank} --main_process_ip 127.0.0.1"
        options += f" --main_process_port {port} --mixed_precision no --dynamo_backend no --rdzv_backend static"
        line = [*apart, sys.executable, "-m", "accelerate.commands.launch", *options.split(), str(script)]
        line += [str(pair.base), str(pair.tuned), str(tmp_path / "two")]
        hosts.append(subprocess.Popen(line, env=launch.environment() | {"TMPDIR": str(own)}))
    assert [host.wait(timeout=300) for host in hosts] == [0, 0]
    launch.succeed(script, pair.base, pair.tuned, tmp_path / "one")
    assert weights(tmp_path / "one") == weights(tmp_path / "two")


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu"), "cpu:0"])
def test_a_device_is_named_as_torch_names_it(models, tmp_path, device):
    pair = models.pair("llama", torch.bfloat16)
    vector = pair.vector() + 0.5 * tiny_models.low_rank(AutoModelForCausalLM.from_pretrained(pair.base))
    expected, found = (
        vector.apply(pair.base, tmp_path / name, scale=-0.6, **given)
        for name, given in (("expected", {}), ("found", {"device": device}))
    )
    assert weights(found) == weights(expected)


def test_two_processes_write_the_same_bytes_as_one(models, tmp_path):
    pair = models.pair("phi", torch.bfloat16)
    script = tmp_path / "script.py"
    script.write_text(_LAUNCHED)
    for processes, name in ((2, "two"), (1, "one")):
        launch.succeed(script, pair.base, pair.tuned, tmp_path / name, processes=processes)
    assert weights(tmp_path / "one") == weights(tmp_path / "two")
    assert len(weights(tmp_path / "one")) > 1
    assert {p.name for p in (tmp_path / "one").iterdir()} == {p.name for p in (tmp_path / "two").iterdir()}


_REFUSED = """
import sys
from support.launch import leave_processes
from hf_taskvec import TaskVector, TaskVectorError
base, tuned, out = sys.argv[1:]
try:
    TaskVector.from_finetuned(base, tuned).apply(base, out)
except TaskVectorError as error:
    print(type(error).__name__, "holds other files" in str(error), flush=True)
leave_processes()
"""


def test_an_output_that_is_refused_is_refused_in_all_processes(models, tmp_path):
    """The others do not wait for a main process that has given up."""
    pair = models.pair("phi")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    script = tmp_path / "script.py"
    script.write_text(_REFUSED)
    printed = launch.succeed(script, pair.base, pair.tuned, tmp_path / "out", processes=2)
    # torch 2.10 prints a line of gloo's own.
    words = [word for line in printed.splitlines() if not line.startswith("[Gloo]") for word in line.split()]
    assert sorted(words) == sorted(["OutputError", "True", "BadValueError", "True"])


# Killed, interrupted, out of disk space.


@pytest.fixture
def larger(tmp_path):
    base = tiny_models.make(
        "phi", torch.bfloat16, hidden_size=256, intermediate_size=1024, vocab_size=2000, num_hidden_layers=6
    )
    return tiny_models.save_pair(tmp_path, base, tiny_models.tuned_copy(base))


_SLOW = """
import os, sys, time
import hf_taskvec.files.safetensors_writer as writer
from hf_taskvec import TaskVector
base, tuned, out = sys.argv[1:]
write = writer.SafetensorsWriter.write
def slowly(self, *arguments):
    time.sleep(0.002)
    write(self, *arguments)
writer.SafetensorsWriter.write = slowly
vector = TaskVector.from_finetuned(base, tuned)
print("ready", flush=True)
vector.apply(base, out, scale=-0.3, max_shard_size="1MB", overwrite=True)
"""


def kill_while_applying(pair, script, out, generator):
    """Kill -9 a run at some moment within 0.8 seconds."""
    said = out.with_suffix(".said")
    said.unlink(missing_ok=True)
    applying = launch.start(script, pair.base, pair.tuned, out, stdout=said)
    while not (said.exists() and said.read_text() == "ready\n"):
        assert applying.running()
        time.sleep(0.001)
    time.sleep(float(torch.rand(1, generator=generator)) * 0.8)
    applying.kill()


@pytest.mark.parametrize("moments", [6, pytest.param(60, marks=pytest.mark.slow)])
def test_killed_at_any_moment_it_leaves_nothing_and_resumes(larger, tmp_path, moments):
    expected = weights(larger.vector().apply(larger.base, tmp_path / "expected", scale=-0.3, max_shard_size="1MB"))
    script, out = tmp_path / "slow.py", tmp_path / "out"
    script.write_text(_SLOW)
    generator = torch.Generator().manual_seed(0)
    finished = 0
    for _ in range(moments):
        kill_while_applying(larger, script, out, generator)
        if out.exists():  # it was quicker than the signal
            finished += 1
            assert weights(out) == expected
            for path in out.iterdir():
                path.unlink()
            out.rmdir()
    assert finished < moments
    larger.vector().apply(larger.base, out, scale=-0.3, max_shard_size="1MB")
    assert weights(out) == expected
    assert not list(tmp_path.glob(".out*"))


@pytest.mark.parametrize("moments", [2, pytest.param(60, marks=pytest.mark.slow)])
def test_killed_at_any_moment_it_leaves_the_old_output(larger, tmp_path, moments):
    vector, script, out = larger.vector(), tmp_path / "slow.py", tmp_path / "out"
    script.write_text(_SLOW)
    options = {"max_shard_size": "1MB", "overwrite": True}
    expected = weights(vector.apply(larger.base, tmp_path / "expected", scale=-0.3, **options))
    old = weights(vector.apply(larger.base, out, scale=0.5, **options))
    generator = torch.Generator().manual_seed(1)
    kept = 0
    for _ in range(moments):
        kill_while_applying(larger, script, out, generator)
        if not out.exists():  # killed between two renames
            out = Path((tmp_path / ".out.replaced").rename(out))
        kept += weights(out) == old
        if weights(out) != old:  # it was quicker than the signal
            assert weights(out) == expected
            vector.apply(larger.base, out, scale=0.5, **options)
    assert kept
    assert weights(vector.apply(larger.base, out, scale=-0.3, **options)) == expected
    assert not list(tmp_path.glob(".out*"))


def test_a_resumed_run_keeps_finished_files_and_rejects_damaged_ones(larger, tmp_path, monkeypatch):
    import hf_taskvec.application.checkpoint_writing as module

    vector = larger.vector()
    expected = weights(vector.apply(larger.base, tmp_path / "expected", max_shard_size="1MB"))
    real, written = module._write_tiles, []

    def failing(task):
        if len(written) > 30:
            raise KeyboardInterrupt
        written.append(task[1].name)
        return real(task)

    monkeypatch.setattr(module, "_write_tiles", failing)
    with pytest.raises(KeyboardInterrupt):
        vector.apply(larger.base, tmp_path / "out", max_shard_size="1MB", threads=1)
    unfinished = tmp_path / ".out.unfinished"
    finished = sorted(path for path in unfinished.glob("*.safetensors"))
    assert len(finished) > 2 and not (tmp_path / "out").exists()
    with finished[0].open("r+b") as file:  # damage one: it must be made again
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    again = []
    monkeypatch.setattr(module, "_write_tiles", lambda task: (again.append(task[1].name), real(task))[1])
    vector.apply(larger.base, tmp_path / "out", max_shard_size="1MB")
    assert weights(tmp_path / "out") == expected
    with safe_open(tmp_path / "expected" / finished[0].name, "pt") as file:
        assert set(file.keys()) <= set(again)
    with safe_open(tmp_path / "expected" / finished[1].name, "pt") as file:
        assert not set(file.keys()) & set(again)


def test_another_job_does_not_take_over_the_files_of_an_interrupted_one(larger, tmp_path, monkeypatch):
    import hf_taskvec.application.checkpoint_writing as module

    vector = larger.vector()
    real, count = module._write_tiles, []

    def failing(task):
        count.append(1)
        if len(count) > 30:
            raise KeyboardInterrupt
        return real(task)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module, "_write_tiles", failing)
        vector.apply(larger.base, tmp_path / "out", max_shard_size="1MB", threads=1)
    expected = weights(vector.apply(larger.base, tmp_path / "expected", scale=0.5, max_shard_size="1MB"))
    assert weights(vector.apply(larger.base, tmp_path / "out", scale=0.5, max_shard_size="1MB")) == expected


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_full_disk_is_a_clear_error_and_leaves_nothing(larger, tmp_path, monkeypatch):
    import hf_taskvec.application.to_checkpoint as module

    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(small)], capture_output=True).returncode:
        pytest.skip("cannot mount a small file system here")
    try:
        with pytest.raises(OutputError, match=r"needs [\d.]+ MB, and only [\d.]+ MB are free there"):
            larger.vector().apply(larger.base, small / "out")
        monkeypatch.setattr(module, "_check_space", lambda *_: None)  # as if the disk filled up meanwhile
        with pytest.raises(OutputError, match="No space left on device"):
            larger.vector().apply(larger.base, small / "out")
        assert not (small / "out").exists()
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_a_folder_that_cannot_be_written_to_is_a_clear_error(larger, tmp_path):
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    if as_root := os.geteuid() == 0:  # nothing is forbidden to root but a file system that is read-only
        mount = ["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(closed)]
        if subprocess.run(mount, capture_output=True).returncode:
            pytest.skip("cannot mount a read-only file system here")
    try:
        with pytest.raises(OutputError, match=r"cannot write to out: (Permission denied|Read-only).*another folder"):
            larger.vector().apply(larger.base, closed / "out")
    finally:
        if as_root:
            subprocess.run(["umount", str(closed)], check=True)


# Bad input.


def test_a_model_of_another_architecture_is_refused(models, tmp_path):
    with pytest.raises(MismatchError, match=r"made for PhiForCausalLM; .* is GPT2LMHeadModel: 0 of 33 names match"):
        models.pair("phi").vector().apply(models.pair("gpt2").base, tmp_path / "out")


def test_a_model_of_another_size_or_vocabulary_is_refused(models, tmp_path):
    vector = models.pair("llama").vector()
    with pytest.raises(
        MismatchError, match=r"(embed_tokens|lm_head).weight: the vocabulary sizes differ, 24 in the model and 20"
    ):
        vector.apply(models.pair("llama", vocab_size=24).base, tmp_path / "out")
    with pytest.raises(MismatchError, match=r"the model has shape .* models of different sizes"):
        vector.apply(models.pair("llama", intermediate_size=48).base, tmp_path / "out")


def test_what_must_not_be_overwritten_is_not(models, tmp_path):
    pair = models.pair("llama")
    vector = pair.vector()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("precious")
    with pytest.raises(OutputError, match=r"holds other files .* Choose a new or empty folder"):
        vector.apply(pair.base, tmp_path / "mine", overwrite=True)
    with pytest.raises(OutputError, match="is the base's own folder"):
        vector.apply(pair.base, pair.base)
    vector.apply(pair.base, tmp_path / "out")
    with pytest.raises(OutputError, match="overwrite=True"):
        vector.apply(pair.base, tmp_path / "out")
    vector.apply(pair.base, tmp_path / "out", scale=0.5, overwrite=True)
    assert '"expression": "0.5*tuned"' in (tmp_path / "out" / "taskvec_apply.json").read_text()


def test_bad_arguments_are_refused(models, tmp_path):
    pair = models.pair("llama")
    vector = pair.vector()
    with pytest.raises(BadValueError, match="scaled by nan"):
        vector.apply(pair.base, tmp_path / "out", scale=float("nan"))
    with pytest.raises(BadValueError, match=r"'int8' is not a floating dtype"):
        vector.apply(pair.base, tmp_path / "out", dtype="int8")
    with pytest.raises(BadValueError, match="threads=0"):
        vector.apply(pair.base, tmp_path / "out", threads=0)
    for device in ("abacus", "cuda:99", "meta", "privateuseone", "hpu", "", 99):
        with pytest.raises(BadValueError, match=rf"device='{device}' is not a device .* finds here"):
            vector.apply(pair.base, tmp_path / "out", device=device)
    assert not list(tmp_path.iterdir())
    with pytest.raises(BadValueError, match="use applied_to"):
        vector.apply(tiny_models.make("llama"), tmp_path / "out")
    with pytest.raises(ChangedSourceError, match="not the base"):
        vector.apply(pair.tuned, tmp_path / "out", strict_base=True)
    with pytest.raises(BadValueError, match=r"weight: the result .* too large for float16"):
        vector.apply(pair.base, tmp_path / "out", scale=1e8, dtype="float16")
    assert not (tmp_path / "out").exists()


def test_nothing_is_a_legal_change(models, tmp_path):
    """λ = 0 and an empty vector give the base back."""
    pair = models.pair("llama")
    vector = pair.vector()
    for number, each in enumerate((vector - vector, 0 * vector)):
        out = each.apply(pair.base, tmp_path / f"out{number}")
        assert weights(out) == weights(pair.base)
    assert weights(vector.apply(pair.base, tmp_path / "zero", scale=0.0)) == weights(pair.base)
    with pytest.raises(MismatchError):  # but it must fit all the same
        vector.apply(models.pair("gpt2").base, tmp_path / "other", scale=0.0)


def test_an_extended_vocabulary_grows_the_checkpoint(models, tmp_path):
    pair, larger = models.pair("llama"), models.pair("llama", vocab_size=24)
    vector = TaskVector.from_finetuned(pair.base, larger.tuned, vocabulary="extend")
    out = vector.apply(pair.base, tmp_path / "out")
    expected, found = stored(larger.tuned), stored(out)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert AutoModelForCausalLM.from_pretrained(out).config.vocab_size == 24
    with pytest.raises(MismatchError, match="can be applied to a checkpoint"):
        vector.edit(AutoModelForCausalLM.from_pretrained(pair.base))


def test_a_second_run_into_the_same_folder_is_refused(models, tmp_path, monkeypatch):
    import hf_taskvec.application.checkpoint_writing as module

    pair = models.pair("llama")
    real = module._write_tiles
    refused = []

    def meanwhile(task):
        if not refused:
            refused.append(True)
            with pytest.raises(OutputError, match="another run is writing out"):
                pair.vector().apply(pair.base, tmp_path / "out", scale=0.5)
        return real(task)

    monkeypatch.setattr(module, "_write_tiles", meanwhile)
    pair.vector().apply(pair.base, tmp_path / "out", threads=1)
    assert refused
    assert weights(tmp_path / "out") == weights(pair.tuned)


def test_a_file_that_is_written_over_is_noticed(models, tmp_path):
    pair = models.pair("llama")
    copy = tmp_path / "tuned"
    copy.mkdir()
    for path in pair.tuned.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    vector = TaskVector.from_finetuned(pair.base, copy)
    (copy / "model.safetensors").write_bytes((pair.base / "model.safetensors").read_bytes())  # in place
    with pytest.raises(ChangedSourceError, match=r"model.safetensors in tuned was written over"):
        vector.norm()


def test_an_output_behind_a_link_is_written_where_it_points(models, tmp_path):
    pair = models.pair("llama")
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "out", target_is_directory=True)
    pair.vector().apply(pair.base, tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert weights(tmp_path / "disk" / "out") == weights(pair.tuned)


def test_buffers_are_not_converted(models, tmp_path):
    """An old checkpoint's mask value does not fit into fp16, and is no weight."""
    from safetensors.torch import save_file

    pair = models.pair("gpt_neo")
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text((pair.base / "config.json").read_text())
    mask = {"transformer.h.0.attn.attention.masked_bias": torch.tensor(-1e9)}
    save_file({**stored(pair.base), **mask}, tmp_path / "base" / "model.safetensors", {"format": "pt"})
    out = pair.vector().apply(tmp_path / "base", tmp_path / "out", dtype="float16")
    found = stored(out)
    assert found["transformer.h.0.attn.attention.masked_bias"] == -1e9
    assert found["transformer.wte.weight"].dtype == torch.float16


def test_memory_stays_bounded(tmp_path):
    """Eight vectors over a model of 300 MB: the peak of anonymous memory does not follow."""
    base = tiny_models.make(
        "llama",
        torch.bfloat16,
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=8,
        vocab_size=4000,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=128,
    )
    pair = tiny_models.save_pair(tmp_path, base, tiny_models.tuned_copy(base))
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, threading, time, torch\n"
        "from hf_taskvec import TaskVector\n"
        "import hf_taskvec.application.to_checkpoint\n"
        "def anonymous():\n"
        "    return next(int(l.split()[1]) for l in open('/proc/self/status') if l.startswith('RssAnon'))\n"
        "base, tuned, out = sys.argv[1:]\n"
        "vector = TaskVector.from_finetuned(base, tuned)\n"
        "names = [n for n in vector if len(vector.shape(n)) == 2]\n"
        "for k in range(4):\n"
        "    factors = {n: (torch.randn(vector.shape(n)[0], 16), torch.randn(16, vector.shape(n)[1])) for n in names}\n"
        "    vector = vector + 0.01 * TaskVector.from_tensors(factors, name=f'v{k}')\n"
        "before, peak, done = anonymous(), [0], []\n"
        "def watch():\n"
        "    while not done:\n"
        "        peak[0] = max(peak[0], anonymous()); time.sleep(0.002)\n"
        "thread = threading.Thread(target=watch); thread.start()\n"
        "vector.apply(base, out, scale=-0.5)\n"
        "done.append(1); thread.join()\n"
        "print((peak[0] - before) / 1024)\n"
    )
    run = [sys.executable, str(script), str(pair.base), str(pair.tuned), str(tmp_path / "out")]
    result = subprocess.run(run, check=True, capture_output=True, text=True, timeout=300)
    size = sum(path.stat().st_size for path in pair.base.glob("*.safetensors")) / 2**20
    assert size > 200
    assert float(result.stdout.splitlines()[-1]) < 100
