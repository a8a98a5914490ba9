"""Protocols are frozen, named and hashed, and say what the literature says."""

import dataclasses

import pytest

from hf_taskvec.errors import BadValueError, MissingNameError
from hf_taskvec.evaluation.texts import protocols


def test_the_protocols_of_the_literature_are_there_and_all_differ():
    expected = {"taskvec-v1", "ssu-v1", "ssu-v1-pypi", "ssu-v1-authors", "ssu-v2", "muse-verbmem", "open-unlearning"}
    assert set(protocols.names()) == expected
    assert len({protocols.get(name).hash for name in expected}) == len(expected)
    assert protocols.get() == protocols.get("taskvec-v1") and protocols.get().leak_free


@pytest.mark.parametrize(
    "name, prompt, answer, greedy, scorer",
    [
        ("ssu-v1", 200, 150, True, "rouge_l"),
        ("ssu-v1-pypi", 200, 150, True, "pypi_rouge_l"),
        ("ssu-v1-authors", 200, 150, True, "pypi_rouge_l"),
        ("ssu-v2", 100, 100, False, "rouge_l"),
        ("muse-verbmem", 1, 128, True, "rouge_l"),
        ("open-unlearning", 1, 128, True, "rouge_l_stemmed"),
    ],
)
def test_the_literatures_protocols_have_its_lengths_decoding_and_scorer(name, prompt, answer, greedy, scorer):
    found = protocols.get(name)
    assert (found.prompt_length, found.answer_length, found.decoding.greedy, found.scorer) == (
        prompt,
        answer,
        greedy,
        scorer,
    )


def test_a_protocol_cannot_be_changed_in_place():
    with pytest.raises(dataclasses.FrozenInstanceError):
        protocols.get().seed = 3


@pytest.mark.parametrize(
    "field, value", [("seed", 1), ("samples", 7), ("lower_case", True), ("scorer", "pypi_rouge_l")]
)
def test_every_change_gives_another_hash(field, value):
    changed = protocols.get(**{field: value})
    assert changed.hash != protocols.get().hash
    assert changed.name == protocols.get().name


def test_a_protocol_survives_its_dictionary():
    for name in protocols.names():
        protocol = protocols.get(name)
        assert protocols.Protocol.from_dict(protocol.to_dict()) == protocol


def test_the_hashes_are_stable():
    # Published tables name this hash: changing it silently would make old results incomparable.
    assert protocols.get("ssu-v1").hash == protocols.get("ssu-v1", samples=50).hash
    assert protocols.get().hash == "829d41111c7b22e25a360dc3cd6eb4c72c5bda2814429800cfe17f101cbb5aaf"
    assert protocols.get("ssu-v1").hash == "098792a9c603ecb3d660dfd9a9dd354345055cab6379104b823e933033d2822e"


def test_an_unknown_name_or_field_gets_a_suggestion():
    with pytest.raises(MissingNameError, match="Did you mean 'muse-verbmem'"):
        protocols.get("muse-verbmen")
    with pytest.raises(MissingNameError, match="Did you mean 'prompt_length'"):
        protocols.get(prompt_lenght=3)


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt_length": 0},
        {"samples": 0},
        {"placement": "stride"},
        {"word_tokens": "nltk"},  # its passages are at random sentences
        {"word_tokens": "spacy"},
        {"answer_from": "next_sentence"},
    ],
)
def test_impossible_protocols_are_refused(changes):
    with pytest.raises(BadValueError, match="taskvec-v1"):
        protocols.get(**changes)
