"""The sweep with real task vectors: merged and attached edits give the same report, and leave no trace."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.tiny_books import STORY, make_books, make_tokenizer, tiny_llama, train

from hf_taskvec import TaskVector
from hf_taskvec.evaluation import load_book, protocols, sweep

SHORT = protocols.get(prompt_length=14, answer_length=8, samples=12)
FAST = {"resamples": 200, "permutations": 200}
SCALES = (0, -0.4, -1)


@pytest.fixture(scope="module")
def made():
    tokenizer, books = make_tokenizer(), make_books()
    base = tiny_llama()
    joint = train(copy.deepcopy(base), tokenizer, books, 150)
    config = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")
    adapter = train(get_peft_model(copy.deepcopy(base), config), tokenizer, books[:1], 150, lr=1e-2)
    full = train(copy.deepcopy(base), tokenizer, books[:1], 100)
    vectors = {"lora": TaskVector.from_adapter(adapter), "full": TaskVector.from_finetuned(base, full)}
    return tokenizer, books, joint, vectors


def test_merged_and_attached_edits_give_the_same_report(made):
    tokenizer, books, joint, vectors = made
    before = {name: parameter.clone() for name, parameter in joint.named_parameters()}
    reports = {}
    for merge in (True, False):
        edit = vectors["lora"].edit(joint, merge=merge)
        reports[merge] = sweep(joint, edit, SCALES, books, SHORT, tokenizer=tokenizer, **FAST)
        edit.restore()
        assert all(torch.equal(parameter, before[name]) for name, parameter in joint.named_parameters())
    assert reports[False].settings.mixed_scales and not reports[True].settings.mixed_scales
    assert reports[True].edit == reports[False].edit
    for one, other in zip(reports[True].passages, reports[False].passages, strict=True):
        assert [at.output for at in one.at] == [at.output for at in other.at]
    assert reports[True].score("lamps", -1.0).relative.high < 0  # it does forget


def test_a_full_vector_forgets_and_a_sweep_is_resumed_by_its_fingerprint(made, tmp_path):
    tokenizer, books, joint, vectors = made
    options = {"tokenizer": tokenizer, "store": tmp_path, **FAST}
    with vectors["full"].edit(joint, 0.0) as edit:
        first = sweep(joint, edit, SCALES, books, SHORT, **options)
    assert first.timing.generated > 0 and first.score("lamps", -1.0).relative.high < 0
    with vectors["full"].edit(joint, 0.0) as edit:
        again = sweep(joint, edit, SCALES, books, SHORT, **options)
    assert again.timing.generated == 0
    assert again.scores == first.scores
    with (2 * vectors["full"]).edit(joint, 0.0) as edit:  # another vector never gets this one's texts
        other = sweep(joint, edit, SCALES, books, SHORT, **options)
    assert other.timing.generated > 0


def test_a_book_from_the_hub(hub):
    hub.add_repo("me/stories", {"train.txt": STORY.encode()}, repo_type="dataset")
    found = load_book("me/stories", "lamps", role="forget", block_words=300)
    expected = make_books()[0]
    assert found.fingerprint == expected.fingerprint
    assert found.passages(SHORT)["prompt"] == expected.passages(SHORT)["prompt"]
