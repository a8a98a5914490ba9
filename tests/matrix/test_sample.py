"""A sample of the matrix, in every run of the tests; and what is committed is complete and belongs together."""

import dataclasses

import peft
import pytest
from matrix import lora_cases, make_table, results
from matrix.cases import all_cases, run
from matrix.checks import CHECKS, CLASS_CHECKS
from matrix.other_classes import CLASSES
from matrix.outcomes import CRASHED, WRONG
from matrix.tiny_types import TYPES

SAMPLE = {
    "bert": "a bias that grows with the vocabulary",
    "deepseek_v3": "experts beside shared and dense layers, trained buffers",
    "falcon_h1": "Mamba beside attention, an infinity in its config",
    "gemma3": "text inside a model of pictures, tied",
    "gemma4_text": "trained buffers of single numbers",
    "gpt2": "Conv1D, tied",
    "gpt_neox": "another name on disk",
    "jamba": "Mamba, attention, experts",
    "llama": "nothing special",
    "llama4_text": "routers that give tuples",
    "mixtral": "one tensor per expert on disk, fused ones live",
    "opt": "positions with an offset",
    "phi3": "fused projections",
}


@pytest.mark.parametrize("model_type", SAMPLE)
@pytest.mark.filterwarnings("ignore")
def test_outcomes_of_the_sample_are_the_committed_ones(model_type):
    keys = [(model_type, check) for check in CHECKS]
    changed = results.differences({key: run(*key) for key in keys}, results.expected()[1], keys, reasons=False)
    assert not changed, "\n".join([*changed, "If this is meant: `make test-matrix`, `make matrix-table`."])


@pytest.mark.parametrize(
    "name", ["AlbertForMaskedLM", "CLIPModel", "ConvNextForImageClassification", "T5ForTokenClassification"]
)
@pytest.mark.filterwarnings("ignore")
def test_outcomes_of_other_classes_are_the_committed_ones(name):
    keys = [(name, check) for check in CLASS_CHECKS]
    changed = results.differences({key: run(*key) for key in keys}, results.expected()[1], keys, reasons=False)
    assert not changed, "\n".join([*changed, "If this is meant: `make test-matrix`, `make matrix-table`."])


def test_the_classes_are_all_that_the_auto_classes_give():
    """Counted by what transformers exports: whatever its own tables name beside causal language models."""
    from transformers.models.auto import modeling_auto

    mappings = [each for name, each in vars(modeling_auto).items() if name.startswith("MODEL_FOR_") and "NAMES" in name]
    named = {
        name for each in mappings for names in each.values() for name in ([names] if isinstance(names, str) else names)
    }
    causal = set(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    assert set(CLASSES) == named - causal
    assert len({table for table, _ in CLASSES.values()}) > 40


@pytest.mark.parametrize("label", ["use_dora: true", "bias: all", "use_qalora: true", "use_rslora × use_dora"])
@pytest.mark.filterwarnings("ignore")
def test_outcomes_of_lora_options_are_the_committed_ones(label):
    key = results.LORA, label
    assert not results.differences({key: run(*key)}, results.expected()[1], [key], reasons=False)


def test_every_field_of_lora_config_has_a_case():
    assert {field.name for field in dataclasses.fields(peft.LoraConfig)} - set(lora_cases.FIELDS) == set()


def test_every_case_is_committed_and_no_other():
    versions, outcomes = results.expected()
    if versions != results.versions():
        pytest.skip(f"the committed outcomes are of {versions}")
    assert set(outcomes) == set(all_cases())
    assert {row for row, _ in outcomes} == {*TYPES, *CLASSES, results.LORA}


def test_nothing_that_is_committed_is_wrong():
    assert not [key for key, each in results.expected()[1].items() if each.kind in (WRONG, CRASHED)]


def test_the_page_is_what_the_committed_outcomes_give():
    written = make_table.PAGE.read_text("utf-8")
    assert written == make_table.page(*results.expected()), "run `python tests/matrix/make_table.py --page`"
    readme = make_table.README.read_text("utf-8")
    assert readme == make_table.with_summary(readme, results.expected()[1]), "the same for the README"
