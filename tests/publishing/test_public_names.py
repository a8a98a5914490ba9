"""The package's public names: all there, and imported when first used."""

import subprocess
import sys

import pytest

from hf_taskvec import publishing


def test_every_public_name_is_there() -> None:
    for name in publishing.__all__:
        assert getattr(publishing, name).__name__ == name
    assert dir(publishing) == sorted(publishing.__all__)
    with pytest.raises(AttributeError, match="no attribute 'push_everything'"):
        publishing.push_everything  # noqa: B018


def test_importing_the_package_costs_neither_torch_nor_the_hub() -> None:
    code = (
        "import sys, hf_taskvec.publishing\n"
        "print([m for m in ('torch', 'transformers', 'huggingface_hub', 'jinja2') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
