"""Whole YAMLs of mergekit, beside mergekit 0.1.5 itself, as in `tests/merging/test_mergekit_parity.py`.

The first five are adapted from mergekit's own examples: gradients, filters, slices, layers that move.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from support.command_line import Answer
from support.tiny_models import low_rank, make
from transformers import AutoModelForCausalLM

from hf_taskvec import TaskVector, combine
from hf_taskvec.cli import main
from hf_taskvec.errors import BadValueError, CorruptFileError, MissingFileError, MissingNameError, UnsupportedError
from hf_taskvec.filenames import COMMAND_RECORD
from hf_taskvec.integrations import open_merge, read_mergekit_config

ROOT = Path(__file__).resolve().parents[2]
PYTHON = os.environ.get("MERGEKIT_PYTHON") or str(ROOT / ".venv-mergekit" / "bin" / "python")

YAMLS = {
    "ties": """
        models:
          - model: a
            parameters: {density: [1, 0.7, 0.1], weight: 1.0}
          - model: b
            parameters: {density: 0.5, weight: [0, 0.3, 0.7, 1]}
          - model: c
            parameters:
              density: 0.33
              weight: [{filter: mlp, value: 0.5}, {value: 0}]
        merge_method: ties
        base_model: base
        parameters: {normalize: true, int8_mask: true}
        dtype: float32
    """,
    "ties_sum": """
        models:
          - {model: base}
          - {model: a, parameters: {density: 0.5, weight: 0.5}}
          - {model: b, parameters: {density: 0.5, weight: 0.5}}
        merge_method: ties
        base_model: base
        parameters: {normalize: false, int8_mask: true}
    """,
    "linear": """
        models:
          - {model: a, parameters: {weight: 1.0}}
          - {model: b, parameters: {weight: 0.3}}
          - {model: c, parameters: {weight: 0.5}}
        merge_method: linear
        dtype: float32
    """,
    "gradient_slerp": """
        slices:
          - sources:
              - {model: a, layer_range: [0, 4]}
              - {model: b, layer_range: [0, 4]}
        merge_method: slerp
        base_model: a
        parameters:
          t:
            - {filter: self_attn, value: [0, 0.5, 0.3, 0.7, 1]}
            - {filter: mlp, value: [1, 0.5, 0.7, 0.3, 0]}
            - value: 0.5
    """,
    "layers_on_layers": """
        slices:
          - sources: [{model: a, layer_range: [0, 3]}]
          - sources: [{model: b, layer_range: [1, 4]}]
        merge_method: passthrough
        dtype: float16
    """,
    "slerp_of_models": """
        models: [{model: b}]
        merge_method: slerp
        base_model: a
        parameters: {t: [0, 1]}
    """,
    "linear_sum": """
        models:
          - {model: a, parameters: {weight: [0.9, 0.2]}}
          - {model: b, parameters: {weight: -0.3}}
          - {model: base, parameters: {weight: 0.5}}
        merge_method: linear
        parameters: {normalize: false}
    """,
    "task_arithmetic": """
        models:
          - {model: a, parameters: {weight: 0.7}}
          - {model: b, parameters: {weight: -0.4}}
        merge_method: task_arithmetic
        base_model: base
        parameters: {lambda: 1.3}
    """,
    "task_arithmetic_normalized": """
        models:
          - {model: a, parameters: {weight: [0.7, 0.1, 2]}}
          - {model: b, parameters: {weight: 0.4}}
        merge_method: task_arithmetic
        base_model: base
        parameters: {normalize: [{filter: mlp, value: true}, {value: false}]}
    """,
    "breadcrumbs": """
        models:
          - {model: a, parameters: {weight: 0.5, density: 0.7, gamma: 0.02}}
          - {model: b, parameters: {weight: 0.5, density: [0.5, 0.9], gamma: 0.05}}
        merge_method: breadcrumbs
        base_model: base
    """,
    "breadcrumbs_ties": """
        models:
          - {model: a, parameters: {weight: 0.6}}
          - {model: b, parameters: {weight: 0.5}}
          - {model: c, parameters: {weight: 0.2}}
        merge_method: breadcrumbs_ties
        base_model: base
        parameters: {density: 0.8, gamma: 0.03, normalize: true}
    """,
    "dare_ties": """
        models:
          - {model: a, parameters: {weight: 0.6}}
          - {model: b, parameters: {weight: [0.1, 0.9]}}
        merge_method: dare_ties
        base_model: base
        parameters: {density: 1.0}
    """,
    "dare_linear": """
        models:
          - {model: a, parameters: {weight: 0.6}}
          - {model: b, parameters: {weight: [0.1, 0.9]}}
        merge_method: dare_linear
        base_model: base
        parameters: {normalize: true}
    """,
    "della": """
        models:
          - {model: a, parameters: {weight: 0.6}}
          - {model: b, parameters: {weight: [0.1, 0.9]}}
        merge_method: della
        base_model: base
        parameters: {lambda: 0.5}
    """,
    "della_linear": """
        models:
          - {model: a, parameters: {weight: 0.6}}
          - {model: b, parameters: {weight: 0.3}}
        merge_method: della_linear
        base_model: base
    """,
    "nuslerp": """
        models:
          - {model: a, parameters: {weight: [0.8, 0.1]}}
          - {model: b, parameters: {weight: 0.4}}
        merge_method: nuslerp
        base_model: base
    """,
    "nuslerp_of_models": """
        models:
          - {model: a, parameters: {weight: 0.8}}
          - {model: b, parameters: {weight: 0.4}}
        merge_method: nuslerp
    """,
    "model_stock": """
        models: [{model: a}, {model: b}, {model: c}]
        merge_method: model_stock
        base_model: base
    """,
    "sce": """
        models: [{model: a}, {model: b}, {model: c}]
        merge_method: sce
        base_model: base
        parameters: {select_topk: [0.1, 0.5]}
    """,
    "slices_in_place": """
        slices:
          - sources:
              - {model: base, layer_range: [0, 1]}
              - {model: a, layer_range: [0, 1], parameters: {weight: 0.3}}
          - sources:
              - {model: base, layer_range: [1, 4]}
              - {model: b, layer_range: [1, 4], parameters: {weight: [0, 1]}}
            parameters: {density: 0.9}
        merge_method: ties
        base_model: base
        parameters: {density: 0.5}
    """,
    "slices_that_merge": """
        slices:
          - sources:
              - {model: a, layer_range: [0, 2]}
              - {model: b, layer_range: [2, 4]}
          - sources:
              - {model: a, layer_range: [1, 4]}
              - {model: b, layer_range: [0, 3], parameters: {}}
        merge_method: slerp
        base_model: a
        parameters: {t: [0.2, 0.8]}
    """,
    "passthrough_scaled": """
        slices:
          - sources:
              - model: a
                layer_range: [0, 4]
                parameters:
                  scale: [{filter: o_proj, value: 0.5}, {filter: down_proj, value: [0, 1]}]
        merge_method: passthrough
    """,
    "with_adapter": """
        models:
          - {model: a+lora, parameters: {weight: 0.5}}
          - {model: base+lora, parameters: {weight: 0.25}}
        merge_method: task_arithmetic
        base_model: base
    """,
}
MODELS = ["base", "a", "b", "c"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, three fine-tunes of it that share some of what they learned, and an adapter."""
    folder = tmp_path_factory.mktemp("mergekit")
    torch.manual_seed(0)
    model = make("llama", num_hidden_layers=4, tie_word_embeddings=False)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    shared = {name: 0.02 * torch.randn(weight.shape) for name, weight in before.items()}
    for where in MODELS:
        model.save_pretrained(folder / where)
        model.load_state_dict(
            {name: each + shared[name] + 0.03 * torch.randn(each.shape) for name, each in before.items()}
        )
    model.load_state_dict(before)
    low_rank(model, rank=2).to_adapter(folder / "lora", base=folder / "base")
    return folder


def config(name: str, folder: Path) -> dict[str, Any]:
    """A YAML with the folders' whole paths."""

    def located(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {each: located(inner, each) for each, inner in value.items()}
        if isinstance(value, list):
            return [located(each) for each in value]
        return "+".join(str(folder / part) for part in value.split("+")) if key in ("model", "base_model") else value

    return located(yaml.safe_load(YAMLS[name]))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: each for path in folder.glob("*.safetensors") for name, each in load_file(path).items()}


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Path:
    if not Path(PYTHON).is_file():
        pytest.skip("there is no mergekit: run `make test-mergekit`")
    (folder / "yamls").mkdir()
    for name in YAMLS:
        (folder / "yamls" / f"{name}.yaml").write_text(yaml.safe_dump(config(name, folder)))
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
    script = ROOT / "tests" / "support" / "mergekit_runs.py"
    done = subprocess.run(
        [PYTHON, script, folder / "yamls", folder / "theirs"], env=clean, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder / "theirs"


@pytest.mark.parametrize("name", YAMLS)
def test_a_yaml_gives_what_mergekit_gives(name: str, folder: Path, theirs: Path, tmp_path: Path) -> None:
    """mergekit rounds in each step, in fp32; so it is a few units away, at the size of what took part."""
    found = weights(open_merge(config(name, folder)).apply(tmp_path / "ours"))
    expected = weights(theirs / name)
    assert found.keys() == expected.keys()
    largest = torch.stack([weights(folder / model)["model.embed_tokens.weight"].abs().max() for model in MODELS]).max()
    for weight, value in expected.items():
        assert found[weight].dtype == value.dtype and found[weight].shape == value.shape
        unit = torch.finfo(value.dtype).eps * max(value.abs().max().item(), largest.item())
        assert (found[weight].double() - value.double()).abs().max() <= 8 * unit, weight
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "ours").config.num_hidden_layers == (
        6 if name == "layers_on_layers" else 5 if name == "slices_that_merge" else 4
    )


# What holds without mergekit.


def test_models_become_one_vector_by_the_rule_of_the_same_name(folder: Path, tmp_path: Path) -> None:
    merge = open_merge(config("task_arithmetic", folder))
    a, b = (TaskVector.from_finetuned(folder / "base", folder / name) for name in "ab")
    expected = 1.3 * (0.7 * a - 0.4 * b)
    assert merge.base.name == "base" and set(merge.vector) == set(expected)
    for name in merge.vector:
        assert torch.allclose(merge.vector.dense(name), expected.dense(name), atol=1e-8)
    assert merge.vector.expression.startswith("combine([a, b], 'mergekit', method='task_arithmetic', slices=[")
    merge.vector.save(tmp_path / "vector")
    assert TaskVector.load(tmp_path / "vector").expression == merge.vector.expression
    half = weights(merge.apply(tmp_path / "half", scale=0.5))
    beside = weights((0.5 * merge.vector).apply(folder / "base", tmp_path / "beside"))
    assert all(torch.equal(each, beside[name]) for name, each in half.items())


def test_an_adapter_stays_low_rank(folder: Path) -> None:
    models = [{"model": f"{folder / 'base'}+{folder / 'lora'}", "parameters": {"weight": 0.5}}]
    merge = open_merge({"merge_method": "task_arithmetic", "base_model": str(folder / "base"), "models": models})
    assert all(change.is_low_rank for change in merge.vector.values())
    assert merge.vector.rank("model.layers.0.mlp.up_proj.weight") == 2


def test_layers_that_are_put_together_are_those_of_the_models(folder: Path, tmp_path: Path) -> None:
    merge = open_merge(config("layers_on_layers", folder))
    found = weights(merge.apply(tmp_path / "out"))
    a, b = weights(folder / "a"), weights(folder / "b")
    key = "model.layers.{}.mlp.up_proj.weight"
    for number, (model, taken) in enumerate([(a, 0), (a, 1), (a, 2), (b, 1), (b, 2), (b, 3)]):
        assert torch.equal(found[key.format(number)], model[key.format(taken)].half())
    assert torch.equal(found["model.embed_tokens.weight"], a["model.embed_tokens.weight"].half())
    assert torch.equal(found["lm_head.weight"], b["lm_head.weight"].half())
    assert len(merge.vector) == 0


def test_a_gradient_goes_over_the_layers_of_the_model_even_where_a_vector_does_not(
    folder: Path, tmp_path: Path
) -> None:
    """Layers are counted in the model: here the adapter changes the first two of four."""
    vector = TaskVector.from_adapter(folder / "lora", base=folder / "base").filter(layers=range(2))
    vector.to_adapter(tmp_path / "first", base=folder / "base")
    models = [{"model": f"{folder / 'base'}+{tmp_path / 'first'}", "parameters": {"weight": [0, 3]}}]
    merge = open_merge({"merge_method": "task_arithmetic", "base_model": str(folder / "base"), "models": models})
    name = "model.layers.1.mlp.up_proj.weight"
    assert torch.allclose(merge.vector.dense(name), vector.dense(name), atol=1e-7)  # a third of the way, times 3


def test_random_methods_keep_the_expected_value_and_go_by_the_seed(folder: Path) -> None:
    given = config("dare_linear", folder) | {"parameters": {"density": 0.5}}
    first, again, other = (open_merge(given, seed=seed).vector for seed in (0, 0, 1))
    name = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(first.dense(name), again.dense(name)) and not torch.equal(first.dense(name), other.dense(name))
    vectors = [TaskVector.from_finetuned(folder / "base", folder / each, name=each) for each in "ab"]
    place = 1 / 3
    expected = combine(vectors, "dare", [0.6, 0.1 + 0.8 * place], density=0.5)
    assert torch.allclose(first.dense(name), expected.dense(name), atol=1e-7)


MODEL = {"model": "a", "parameters": {"weight": 1.0}}
TIES = {"merge_method": "ties", "base_model": "base", "models": [MODEL]}
REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({}, BadValueError, "merge_method must be a text"),
    ({**TIES, "merge_method": "tied"}, MissingNameError, r"'tied' is not supported. Did you mean 'ties'"),
    ({**TIES, "merge_method": "karcher"}, MissingNameError, "'karcher' is not supported"),
    ({**TIES, "modules": {}}, UnsupportedError, "modules is not supported"),
    ({**TIES, "tokenizer": {"source": "union"}}, UnsupportedError, "tokenizer is not supported"),
    ({**TIES, "chat_template": "auto"}, UnsupportedError, "chat_template is not supported"),
    ({**TIES, "basemodel": "x"}, BadValueError, "'basemodel' is no option there. Did you mean 'base_model'"),
    ({**TIES, "base_model": None}, BadValueError, "ties needs a base_model"),
    ({**TIES, "base_model": "base+lora"}, UnsupportedError, "taskvec apply lora base -o BASE"),
    ({**TIES, "models": []}, BadValueError, "either models or slices, and has neither"),
    ({**TIES, "slices": [{"sources": []}]}, BadValueError, "models and slices"),
    ({**TIES, "models": [MODEL, MODEL]}, BadValueError, "a is there twice"),
    ({**TIES, "models": [{"model": "a+b+c"}]}, BadValueError, "more than one adapter"),
    ({**TIES, "models": [{"model": {"path": "a"}}]}, BadValueError, "model must be a text"),
    ({**TIES, "models": [{**MODEL, "layer_range": [0, 1]}]}, BadValueError, "'layer_range' is no option there"),
    ({**TIES, "parameters": {"densty": 0.5}}, MissingNameError, "ties has no parameter 'densty'.*'density'"),
    ({**TIES, "parameters": {"gamma": 0.5}}, MissingNameError, "ties has no parameter 'gamma'"),
    ({**TIES, "parameters": {"density": "half"}}, BadValueError, "density must be a number, a list"),
    ({**TIES, "parameters": {"density": []}}, BadValueError, "density must be a number, a list"),
    ({**TIES, "parameters": {"density": [{"filter": "mlp"}]}}, BadValueError, "needs a value"),
    ({**TIES, "parameters": {"density": [{"value": 1, "filters": "x"}]}}, BadValueError, "'filters' beside"),
    ({**TIES, "models": [{"model": "a", "parameters": {"normalize": True}}]}, BadValueError, "of the whole merge"),
    ({"merge_method": "linear", "base_model": "c", "models": [MODEL]}, BadValueError, "has to be one of them"),
    ({"merge_method": "linear", "slices": [{"sources": [{"model": "a"}]}]}, BadValueError, "layer_range of a"),
    (
        {"merge_method": "linear", "slices": [{"sources": [{"model": "a", "layer_range": [3, 3]}]}]},
        BadValueError,
        "is empty",
    ),
    (
        {
            "merge_method": "linear",
            "slices": [{"sources": [{"model": "a", "layer_range": [0, 3]}, {"model": "b", "layer_range": [0, 2]}]}],
        },
        BadValueError,
        "same number of layers",
    ),
    ({**TIES, "slices": None, "dtype": 16}, BadValueError, "dtype must be a text"),
]


@pytest.mark.parametrize(("given", "kind", "message"), REFUSED, ids=lambda value: value if type(value) is str else "")
def test_what_is_not_understood_is_refused_before_a_model_is_opened(
    given: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        read_mergekit_config(given)


def test_what_the_models_or_the_weights_tell_is_refused(folder: Path, tmp_path: Path) -> None:
    base, a, b = (str(folder / name) for name in ("base", "a", "b"))
    ties = {"merge_method": "ties", "base_model": base}
    for models, options, message in [
        ([{"model": a}], {}, "weight is missing for .*'ties' needs one of each model"),
        ([{"model": a, "parameters": {"weight": [{"filter": "mlp", "value": 1}]}}], {}, "weight is missing"),
        ([{"model": a, "parameters": {"weight": 1, "density": 0}}], {}, "density=0"),
        ([{"model": a, "parameters": {"weight": 1}}], {"parameters": {"rescale": True}}, "rescale: true"),
        ([{"model": a, "parameters": {"weight": 1}}], {"parameters": {"normalize": 2}}, "normalize=2 must be true"),
        ([{"model": a, "parameters": {"weight": 1}}], {"tokenizer_source": "union"}, "different vocabularies, or none"),
        ([{"model": a, "parameters": {"weight": 1}}], {"tokenizer_source": "z"}, "none of the models"),
    ]:
        with pytest.raises((BadValueError, UnsupportedError), match=message):
            open_merge({**ties, **options, "models": models})
    with pytest.raises(BadValueError, match="t is missing"):
        open_merge({"merge_method": "slerp", "base_model": a, "models": [{"model": b}]})
    with pytest.raises(BadValueError, match="at least two models besides"):
        open_merge({"merge_method": "model_stock", "base_model": base, "models": [{"model": a}]})
    with pytest.raises(BadValueError, match="weights add up to 0"):
        pair = [{"model": each, "parameters": {"weight": weight}} for each, weight in ((a, 1), (b, -1))]
        open_merge({"merge_method": "linear", "models": pair})
    slices = [{"sources": [{"model": a, "layer_range": [2, 6]}]}]
    with pytest.raises(Exception, match="has no layer 4: it has 4, counted from 0"):
        open_merge({"merge_method": "passthrough", "slices": slices})
    with pytest.raises(MissingFileError, match="no file"):
        read_mergekit_config(tmp_path / "nowhere.yaml")
    (tmp_path / "bad.yaml").write_text("a: [")
    with pytest.raises(CorruptFileError, match=r"bad\.yaml is not valid YAML"):
        read_mergekit_config(tmp_path / "bad.yaml")


def test_the_command_writes_the_same(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "merge.yaml").write_text(yaml.safe_dump(config("ties", folder)))

    def taskvec(*arguments: str) -> Answer:
        capsys.readouterr()
        with pytest.raises(SystemExit) as done:
            main(["merge", str(tmp_path / "merge.yaml"), "-o", str(tmp_path / "out"), "--json", *arguments])
        return Answer(int(done.value.code or 0), *capsys.readouterr())

    planned = taskvec("--dry-run").json
    assert len(planned["reads"]) == 4 and not (tmp_path / "out").exists()
    told = taskvec().json
    assert told["method"] == "ties" and told["bytes"] <= next(iter(planned["writes"].values()))
    expected = weights(open_merge(tmp_path / "merge.yaml").apply(tmp_path / "beside"))
    assert all(torch.equal(each, expected[name]) for name, each in weights(tmp_path / "out").items())
    assert "merge" in json.loads((tmp_path / "out" / COMMAND_RECORD).read_text())["commands"][0]
