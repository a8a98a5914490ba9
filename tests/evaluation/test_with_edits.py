"""The sweep with real task vectors: merged and attached edits give the same report, and leave no trace."""

import copy
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.tiny_books import STORY, make_books, train

from hf_taskvec import TaskVector
from hf_taskvec.errors import BadValueError
from hf_taskvec.evaluation import load_book, protocols, sweep
from hf_taskvec.evaluation.asking.scalable_edits import check_edit

SHORT = protocols.get(prompt_length=14, answer_length=8, samples=12)
FAST = {"resamples": 200, "permutations": 200}
SCALES = (0, -0.4, -1)


@pytest.fixture(scope="module")
def vectors(made):
    """Of the book to forget: from an adapter, and from full fine-tuning."""
    tokenizer, books, base, _, single = made
    config = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")
    adapter = train(get_peft_model(copy.deepcopy(base), config), tokenizer, books[:1], 150, lr=1e-2)
    return {"lora": TaskVector.from_adapter(adapter), "full": TaskVector.from_finetuned(base, single)}


def test_merged_and_attached_edits_give_the_same_report(made, vectors):
    tokenizer, books, _, joint, _ = made
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


def test_a_full_vector_forgets_and_a_sweep_is_resumed_by_its_fingerprint(made, vectors, tmp_path):
    tokenizer, books, _, joint, _ = made
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


@pytest.mark.parametrize("merge", [True, False])
def test_a_vector_is_swept_as_its_edit_is_and_the_model_is_as_before(made, vectors, merge):
    tokenizer, books, _, joint, _ = made
    before = {name: parameter.clone() for name, parameter in joint.named_parameters()}
    options = {"tokenizer": tokenizer, **FAST}
    found = sweep(joint, vectors["lora"], SCALES, books, SHORT, merge=merge, **options)
    assert_untouched(joint, before)
    with vectors["lora"].edit(joint, 0.0, merge=merge) as edit:
        expected = sweep(joint, edit, SCALES, books, SHORT, **options)
    assert replace(found, timing=expected.timing) == expected
    assert found.settings.mixed_scales == (not merge) and found.score("lamps", -1.0).relative.high < 0


@pytest.mark.parametrize("merge", [True, False])
def test_a_failing_sweep_of_a_vector_leaves_the_model_as_before(made, vectors, merge):
    tokenizer, books, _, joint, _ = made
    before = {name: parameter.clone() for name, parameter in joint.named_parameters()}
    left = [40]  # forward passes, so that it stops at some λ

    def stop(*_):
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt

    handle = joint.model.register_forward_pre_hook(stop)
    try:
        with pytest.raises(KeyboardInterrupt):
            sweep(
                joint, vectors["lora"], SCALES[1:], books, SHORT, merge=merge, tokenizer=tokenizer, batch_size=4, **FAST
            )
    finally:
        handle.remove()
    assert_untouched(joint, before)


def assert_untouched(model, before):
    """The weights are as before, and no edit is left: neither its hooks nor its claim to be the newest."""
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    for module in model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks and "forward" not in vars(module)


def test_an_edit_of_another_model_is_refused_before_any_work(made, vectors, tmp_path):
    """The model that is asked would show no effect at any λ."""
    tokenizer, books, _, joint, _ = made
    other = copy.deepcopy(joint)
    options = {"tokenizer": tokenizer, "output": tmp_path / "out", **FAST}
    for merge in (True, False):
        with vectors["lora"].edit(other, merge=merge) as edit:
            with pytest.raises(BadValueError, match="the edit is on another model than the one that is asked"):
                sweep(joint, edit, SCALES, books, SHORT, **options)
            assert edit.scale == 1.0
    assert not (tmp_path / "out").exists()
    with vectors["lora"].edit(joint) as edit, pytest.raises(BadValueError, match="merge=False is for a task vector"):
        sweep(joint, edit, SCALES, books, SHORT, merge=False, **options)


def test_what_a_model_answers_with_an_edit_attached_is_not_reused_without_it(made, vectors, tmp_path):
    tokenizer, books, _, joint, _ = made
    control = {"store": tmp_path, "tokenizer": tokenizer, **FAST}
    short = protocols.get(SHORT, samples=2)
    with vectors["lora"].applied_to(joint, -1.0, merge=False) as edit:
        edited = sweep(joint, None, [0], books, short, **control)
        edit.set_scale(-0.5)
        other = sweep(joint, None, [0], books, short, **control)
    plain = sweep(joint, None, [0], books, short, **control)
    assert edited.timing.reused == other.timing.reused == plain.timing.reused == 0
    assert len({edited.model, other.model, plain.model}) == 3
    with vectors["lora"].applied_to(joint, -1.0, merge=False):
        again = sweep(joint, None, [0], books, short, **control)
    assert again.timing.generated == 0 and again.scores == edited.scores

    handle = joint.lm_head.register_forward_hook(lambda layer, inputs, output: output * 2)
    try:  # nobody can tell what it does, nor if it will do the same the next time
        steered = [sweep(joint, None, [0], books, short, **control) for _ in range(2)]
    finally:
        handle.remove()
    assert [report.timing.reused for report in steered] == [0, 0]
    assert steered[0].scores == steered[1].scores != plain.scores


def test_an_edit_is_of_the_same_model_inside_and_outside_of_wrappers(made, vectors):
    tokenizer, books, _, joint, _ = made
    inner = copy.deepcopy(joint)
    wrapped = get_peft_model(inner, LoraConfig(r=2, target_modules=["q_proj"]))
    compiled = torch.compile(joint, backend="eager")
    for asked, edited in ((wrapped, inner), (inner, wrapped), (wrapped, wrapped), (compiled, joint)):
        with vectors["lora"].edit(edited) as edit:
            check_edit(edit, asked)
    with vectors["lora"].edit(joint) as edit:
        for asked in (wrapped, inner):
            with pytest.raises(BadValueError, match="another model"):
                check_edit(edit, asked)
    with vectors["lora"].edit(wrapped) as edit, pytest.raises(BadValueError, match="another model"):
        check_edit(edit, joint)
    few = {"tokenizer": tokenizer, **FAST}
    short = protocols.get(SHORT, samples=2)
    with vectors["lora"].edit(inner, 0.0) as edit:
        assert sweep(wrapped, edit, [-1], books, short, **few).score("lamps", -1.0, "perplexity").difference.low > 0


def test_a_book_from_the_hub_is_the_one_from_the_file(hub):
    hub.add_repo("me/stories", {"train.txt": STORY.encode()}, repo_type="dataset")
    found = load_book("me/stories", "lamps", role="forget", block_words=300)
    expected = make_books()[0]
    assert found.fingerprint == expected.fingerprint
    assert found.passages(SHORT)["prompt"] == expected.passages(SHORT)["prompt"]


@pytest.mark.parametrize("progress", [None, False, True])
def test_a_download_shows_its_progress_if_asked_or_on_a_terminal(hub, capfd, progress):
    import datasets

    before = datasets.are_progress_bars_disabled()
    hub.add_repo(f"me/stories-{progress}", {"train.txt": STORY.encode()}, repo_type="dataset")
    load_book(f"me/stories-{progress}", "lamps", block_words=300, progress=progress)
    assert ("train" in capfd.readouterr().err) == (progress is True)
    assert datasets.are_progress_bars_disabled() == before
