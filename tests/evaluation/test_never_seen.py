"""Where the never-seen level comes from, what is measured beside it, and what is said where nothing tells."""

import copy
import json
from dataclasses import replace

import datasets
import pytest
from support.tiny_books import STORY, InPlaceEdit, tiny_llama, train

from hf_taskvec.errors import BadValueError
from hf_taskvec.evaluation import Criteria, Metric, UnlearningReport, load_book, protocols, sweep
from hf_taskvec.evaluation.reporting.passage_halves import choose_scale
from hf_taskvec.evaluation.reporting.report_parts import BookInfo, PassageAtScale, PassageResult
from hf_taskvec.evaluation.reporting.summary import PassageValues
from hf_taskvec.evaluation.scoring.metrics import METRICS
from hf_taskvec.evaluation.scoring.statistics import Draws
from hf_taskvec.training import TrainingSettings, finetune

SHORT = protocols.get(prompt_length=14, answer_length=8, samples=6)
FAST = {"resamples": 100, "permutations": 50}
OTHER = STORY.replace("lamps", "wolves").replace("tells of", "hears").replace("room", "forest")


def book_of(text, name, **more):
    return load_book(datasets.Dataset.from_dict({"text": [text]}), name, block_words=300, **more)


@pytest.fixture(scope="module")
def asked(made):
    """Sweeps of one model, which knows the book to forget, with some books and references."""
    tokenizer, (lamps, boats), base, joint, _ = made

    def ask(books=(lamps, boats), **more):
        model = copy.deepcopy(joint)
        edit = InPlaceEdit(model, base)  # at λ = 1 it is the base
        return sweep(model, edit, [0, 1], list(books), SHORT, tokenizer=tokenizer, **FAST, **more)

    return ask


@pytest.fixture
def unseen():
    return book_of(OTHER, "wolves", role="unseen")


def test_a_reference_comes_before_unseen_text_and_that_before_the_split(asked, made, unseen):
    _, (lamps, boats), base, _, _ = made
    both = asked([lamps, boats, unseen], reference=base, split_followed=True).choice
    assert (both.never_seen.source, both.never_seen.name) == ("reference", "reference")
    text = asked([lamps, boats, unseen], split_followed=True)
    assert text.choice.never_seen.source == "unseen"
    never = next(m.never for m in text.choice.verdict.metrics if m.metric == "loss")
    values = [p.at[0].values["loss"] for p in text.passages if p.book == "wolves"]
    assert min(values) <= never <= max(values)
    assert asked(split_followed=True).choice.never_seen.source == "split"
    assert asked().choice.never_seen.source == "assumed"


def test_the_training_record_says_whether_the_split_was_followed(made, tmp_path):
    tokenizer, (lamps, boats), _, _, _ = made
    tiny_llama().save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    settings = TrainingSettings(epochs=1, learning_rate=1e-3)
    finetune(tmp_path / "base", lamps.training_blocks(tokenizer, 64), settings, tmp_path / "tuned")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "tuned").eval()
    found = sweep(model, None, [0], [lamps, boats], SHORT, tokenizer=tokenizer, **FAST)
    assert found.choice.never_seen.source == "split"
    other = replace(lamps, sections=book_of(STORY, "lamps", seed=1).sections)  # the same text, held out elsewhere
    assert other.fingerprint != lamps.fingerprint
    found = sweep(model, None, [0], [other, boats], SHORT, tokenizer=tokenizer, **FAST)
    assert found.choice.never_seen.source == "assumed"


def test_a_model_that_was_trained_on_the_held_out_part_too_is_found_out(made):
    tokenizer, (lamps, boats), base, _, _ = made
    whole = book_of(STORY, "lamps", role="forget", held_out=0)
    model = train(copy.deepcopy(base), tokenizer, [whole], 150)
    found = sweep(model, InPlaceEdit(model, base), [0, 1], [lamps, boats], SHORT, tokenizer=tokenizer, **FAST).choice
    assert found.never_seen.source == "assumed" and found.never_seen.contradiction is not None
    assert "of lamps" in found.never_seen.contradiction and found.never_seen.contradiction in found.reason
    assert "held_out=0 and give a reference model" in found.reason


def test_books_that_were_seen_entirely_need_a_reference(asked, made):
    _, (_, boats), base, _, _ = made
    whole = book_of(STORY, "lamps", role="forget", held_out=0)
    found = asked([whole, boats], reference=base)
    assert found.books[0].held_out == 0 and not [p for p in found.passages if p.book == "lamps" and p.split != "seen"]
    assert found.choice.verdict.membership == () and "membership was not tested" in found.choice.verdict.sentence
    relative = {m.metric: m.relative for m in found.choice.verdict.metrics if found.choice.judged == 1}
    assert relative["loss"].value == pytest.approx(1.0)
    alone = asked([whole, boats]).choice
    assert alone.scale is None and alone.verdict is None
    assert "Give a reference model (the base, if nothing else), or text that the model never saw" in alone.reason


def test_a_metric_of_ones_own_is_measured_judged_and_told(asked, made, tmp_path):
    _, _, base, _, _ = made
    share = Metric(
        "first_word",
        "memory",
        True,
        "1 if the first word is right",
        compute=lambda passage, _: float(passage.output.split()[:1] == passage.answer.split()[:1]),
    )
    criteria = Criteria(metrics=("first_word", "loss"))
    found = asked(own_metrics=[share], criteria=criteria, reference=base)
    for passage in found.passages:
        for at in passage.at:
            assert at.values["first_word"] == float(at.output.split()[:1] == passage.answer.split()[:1])
    assert [m.metric for m in found.choice.verdict.metrics] == ["first_word", "loss"]
    found.save(tmp_path, plots=False)
    again = UnlearningReport.load(tmp_path)
    assert again == found and again.rechoose(criteria).choice == found.choice
    plain = json.loads((tmp_path / "report.json").read_text())
    assert "first_word" in [info["name"] for info in plain["metrics"]]
    assert "| first_word |" in found.to_markdown().replace("\\_", "_") and "first_word" in found._repr_html_() + str(
        plain
    )
    with pytest.raises(BadValueError, match="'loss' needs a name of its own"):
        asked(own_metrics=[replace(share, name="loss")])


def test_without_likelihoods_texts_alone_are_judged(asked, made):
    _, _, base, _, _ = made
    found = asked(likelihood=False, reference=base)
    assert found.choice.criteria.metrics == ("rouge_l",) and found.membership == ()
    assert [m.metric for m in found.choice.verdict.metrics] == ["rouge_l"]
    assert found.choice.verdict.membership == () and found.to_markdown()
    with pytest.raises(BadValueError, match="'loss' needs the likelihood"):
        found.rechoose(Criteria())


def test_known_by_heart_is_measured_in_the_protocol_s_own_units():
    """Scores from 0 to 100: a Rouge-L of 12 is not known by heart."""
    names = ("rouge_l", "loss", "extraction_strength", "exact_memorisation")

    def passage(split, number):
        values = {"rouge_l": 12.0 + number % 3, **dict.fromkeys(names[1:], 1.0)}
        return PassageResult(f"a/{split}/{number}", "a", split, "", "", (PassageAtScale(0.0, "", values),))

    made = [passage(split, number) for split in ("seen", "held_out") for number in range(24)]
    values = PassageValues(made, (0.0,), [METRICS[name].info for name in names])
    books = [BookInfo("a", "forget", "", 0, 24, 24)]
    for factor, by_heart in ((100.0, False), (1.0, True)):
        found = choose_scale(values, books, Criteria(), Draws(resamples=100), score_factor=factor).never_seen
        assert ("it was trained on them too" in found.contradiction) == by_heart
