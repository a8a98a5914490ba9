"""The package works without what only POSIX systems have, as on Windows."""

import subprocess
import sys
from pathlib import Path

import torch
from support import tiny_models

# The other libraries are imported first: on this system they may use what they find.
_WITHOUT_POSIX = """
import os, sys
import accelerate, datasets, filelock, huggingface_hub, peft, tempfile, torch, tqdm.auto, transformers
from pathlib import Path

for module in "fcntl grp posix pwd pty readline resource spwd syslog termios tty".split():
    sys.modules[module] = None
for function in (
    "chown fchmod fchown fdatasync fork forkpty ftruncate getegid geteuid getgid getpgid getuid killpg lockf mkfifo "
    "pread preadv pwrite pwritev posix_fadvise posix_fallocate sched_getaffinity sync uname"
).split():
    if hasattr(os, function):
        delattr(os, function)
rename = Path.rename

def windows_rename(self, target):  # which replaces nothing
    if Path(target).exists():
        raise FileExistsError(17, "Cannot create a file when that file already exists", str(target))
    return rename(self, target)

Path.rename = windows_rename

from hf_taskvec import TaskVector

base, tuned, out = map(Path, sys.argv[1:])
vector = TaskVector.from_finetuned(base, tuned)
(out / "saved").mkdir()  # an empty folder is replaced
vector.save(out / "saved")
vector.save(out / "saved", overwrite=True)
loaded = TaskVector.load(out / "saved")
loaded.apply(base, out / "applied", threads=2)
loaded.apply(base, out / "applied", threads=2, max_shard_size="20KB", overwrite=True)
model = transformers.AutoModelForCausalLM.from_pretrained(out / "applied")
expected = transformers.AutoModelForCausalLM.from_pretrained(tuned)
for name, weight in expected.state_dict().items():
    assert torch.equal(weight, model.state_dict()[name]), name
assert sorted(path.name for path in out.iterdir()) == ["applied", "saved"]
"""


def test_a_vector_is_saved_loaded_and_applied_without_what_only_posix_has(tmp_path: Path) -> None:
    base = tiny_models.make("phi", torch.bfloat16)
    pair = tiny_models.save_pair(tmp_path, base, tiny_models.tuned_copy(base))
    out = tmp_path / "out"
    out.mkdir()
    arguments = [str(pair.base), str(pair.tuned), str(out)]
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT_POSIX, *arguments], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
