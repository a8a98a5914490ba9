"""The sweep and its report, on tiny models: what it promises whatever the edit is."""

import copy
import json
import os
import subprocess
import sys
from dataclasses import replace
from xml.etree import ElementTree

import pytest
import torch
from support.tiny_books import STORY, HeadEdit, InPlaceEdit, RowHeadEdit, make_books, tiny_gpt2, tiny_llama, train

from hf_taskvec.errors import (
    BadValueError,
    CorruptFileError,
    MismatchError,
    MissingFileError,
    MissingNameError,
    OutputError,
)
from hf_taskvec.evaluation import UnlearningReport, compare_reports, load_book, protocols, sweep
from hf_taskvec.evaluation.reporting.unlearning_report import REPORT_VERSION
from hf_taskvec.evaluation.scoring.criteria import Criteria
from hf_taskvec.evaluation.scoring.scale_choice import NeverSeen

SHORT = protocols.get(prompt_length=14, answer_length=8, samples=12)
FAST = {"resamples": 200, "permutations": 200}
SCALES = (0, -0.5, -1)
LENIENT = Criteria(metrics=("rouge_l",), rule="margin", retain_bound=1.0)  # so that some λ is chosen


def edit_of(model, base, single):
    """θ_joint + λ(θ_single − θ_0): the vector is taken at another model than it is applied to."""
    edit = InPlaceEdit(base, single)
    for i, (name, parameter) in enumerate(model.named_parameters()):
        edit._pairs[i] = (parameter, parameter.detach().clone(), edit._pairs[i][2])
        assert name
    return edit


@pytest.fixture(scope="module")
def report(made):
    tokenizer, books, base, joint, single = made
    model = copy.deepcopy(joint)
    return sweep(model, edit_of(model, base, single), SCALES, books, SHORT, tokenizer=tokenizer, **FAST)


def test_negation_forgets_and_the_report_says_how_much(report):
    drop = report.score("lamps", -1.0).relative
    assert drop.high < 0  # significant
    values = [p.at[0].values["rouge_l"] for p in report.passages if p.book == "lamps" and p.split == "seen"]
    assert report.score("lamps", 0.0).value.value == pytest.approx(sum(values) / len(values))
    after = report.score("lamps", -1.0)
    assert after.relative.value == pytest.approx(after.value.value / report.score("lamps", 0.0).value.value - 1)
    assert after.difference.value == pytest.approx(after.value.value - report.score("lamps", 0.0).value.value)
    assert report.score("lamps", -1.0, "perplexity").relative.low > 0
    assert {s.metric for s in report.scores} == {m.name for m in report.metrics}
    assert len(report.scores) == 2 * 2 * 3 * 12
    assert report.leaks.clean


@pytest.fixture(scope="module")
def three(made):
    """A sweep over a book to forget, an aligned and a retained one, against a model that saw none of the first."""
    import datasets

    tokenizer, (lamps, boats), base, _, single = made
    near = STORY.replace("room", "chamber").replace("lamps", "candles")
    candles = load_book(datasets.Dataset.from_dict({"text": [near]}), "candles", role="aligned", block_words=300)
    books = [lamps, candles, boats]
    model = train(copy.deepcopy(base), tokenizer, books, 250)
    edit = edit_of(model, base, single)
    return sweep(model, edit, SCALES, books, SHORT, tokenizer=tokenizer, reference=base, criteria=LENIENT, **FAST)


def test_it_says_which_book_lost_more_at_every_lambda_and_at_the_chosen_one(three):
    compared = {("lamps", "boats"), ("candles", "boats"), ("lamps", "candles")}
    assert {(t.first, t.second, t.scale) for t in three.tests} == {(*pair, s) for pair in compared for s in SCALES[1:]}
    for pair in compared:
        found = three.test(*pair, -1)
        shares = [-three.score(book, -1).relative.value for book in pair]
        assert (found.first_loss, found.second_loss) == pytest.approx(shares)
        assert found.difference.value == pytest.approx(shares[0] - shares[1])
        assert found.passages == tuple(three.score(book, -1).n for book in pair)
        assert found.metric == "rouge_l" and 0 < found.p_value <= 1
    assert three.choice.judged == -1
    assert {(t.first, t.second) for t in three.choice.tests} == compared
    chosen = three.test("candles", "boats")
    assert chosen in three.choice.tests and chosen.passages[0] < three.test("candles", "boats", -1).passages[0]
    text = three.to_markdown()
    assert "| candles > boats |" in text and "- candles > boats: " in text
    with pytest.raises(MissingNameError, match="no test of 'boats' against 'lamps' at λ=-1; it compares 'candles'"):
        three.test("boats", "lamps", -1)


def test_without_a_book_to_forget_a_test_needs_a_lambda(made):
    tokenizer, books, _, joint, _ = made
    kept = [replace(book, role="retain") for book in books]
    found = sweep(joint, None, [0], kept, SHORT, tokenizer=tokenizer, **FAST)
    assert found.choice is None
    with pytest.raises(BadValueError, match="no λ was chosen"):
        found.test("lamps", "boats")


def test_every_text_and_value_is_kept_and_the_edit_is_back_at_zero(made):
    tokenizer, books, base, joint, single = made
    model = copy.deepcopy(joint)
    edit = edit_of(model, base, single)
    found = sweep(model, edit, SCALES, books, SHORT, tokenizer=tokenizer, **FAST)
    assert edit.calls == [0.0, 0.0, -0.5, -1.0, 0.0]  # once for each λ, and home again
    for one, other in zip(model.parameters(), joint.parameters(), strict=True):
        assert torch.equal(one, other)
    assert all([at.scale for at in p.at] == [0.0, -0.5, -1.0] for p in found.passages)
    for key in ("seed", "plan", "batch_size"):
        assert getattr(found.settings, key) is not None
    assert found.versions["transformers"] and found.timing.generated == 3 * len(found.passages)


def test_one_lambda_per_row_gives_the_same_report_as_one_after_the_other(made):
    tokenizer, books, _, joint, _ = made
    delta = 0.5 * torch.randn(joint.lm_head.weight.shape, generator=torch.Generator().manual_seed(0))
    one, other = copy.deepcopy(joint), copy.deepcopy(joint)
    apart = sweep(one, HeadEdit(one, delta), SCALES, books, SHORT, tokenizer=tokenizer, **FAST)
    rows = RowHeadEdit(other, delta)
    mixed = sweep(other, rows, SCALES, books, SHORT, tokenizer=tokenizer, batch_size=9, **FAST)
    assert mixed.settings.mixed_scales and not apart.settings.mixed_scales
    assert any(len(set(call)) == 3 for call in rows.calls)
    for a, b in zip(apart.passages, mixed.passages, strict=True):
        assert [x.output for x in a.at] == [x.output for x in b.at]
        for x, y in zip(a.at, b.at, strict=True):
            assert x.values == pytest.approx(y.values, rel=1e-3, abs=1e-4)
    assert apart.passages[0].at[0].output != apart.passages[0].at[2].output


def test_an_untouched_model_shows_no_drop(made):
    tokenizer, books, _, joint, _ = made
    found = sweep(joint, None, [0, -1], books, SHORT, tokenizer=tokenizer, **FAST)
    for score in found.scores:
        if score.difference is not None:
            assert score.difference.covers(0)
    assert all(test.p_value > 0.05 for test in found.tests)


def test_without_the_likelihood_only_texts_are_asked_for(made, report, tmp_path):
    tokenizer, books, base, joint, single = made
    model = copy.deepcopy(joint)
    args = {"tokenizer": tokenizer, "output": tmp_path, **FAST}
    edit = edit_of(model, base, single)
    texts = sweep(model, edit, SCALES, books, SHORT, likelihood=False, **args)
    assert {"perplexity", "min_k", "exact_memorisation"}.isdisjoint({m.name for m in texts.metrics})
    assert [p.at[2].output for p in texts.passages] == [p.at[2].output for p in report.passages]
    assert texts.score("lamps", -1.0) == report.score("lamps", -1.0)
    full = sweep(model, edit, SCALES, books, SHORT, **args)  # the store lacks the likelihoods: done again
    assert full.timing.reused == 0 and full.scores == report.scores
    again = sweep(model, edit, SCALES, books, SHORT, likelihood=False, **args)
    assert again.timing.generated == 0 and again.scores == texts.scores
    with pytest.raises(BadValueError, match="needs the likelihood"):
        sweep(model, edit, SCALES, books, SHORT, likelihood=False, criteria=Criteria(), **args)


def test_the_json_comes_back_equal_and_is_plain(report, tmp_path):
    assert report.save(tmp_path) == tmp_path
    written = {path.name for path in tmp_path.iterdir()}
    pictures = {f"{name}.{kind}" for name in ("scores", "pareto", "samples") for kind in ("png", "svg")}
    assert written == {"report.json", "report.md", "report.html"} | pictures
    assert UnlearningReport.load(tmp_path) == report
    plain = json.loads((tmp_path / "report.json").read_text())
    assert plain["schema"] == "hf_taskvec/unlearning-report" and plain["version"] == REPORT_VERSION
    assert plain["protocol"]["hash"] == SHORT.hash
    assert not list(tmp_path.glob(".*"))
    assert (tmp_path / "scores.png").read_bytes().startswith(b"\x89PNG")
    assert b"</svg>" in (tmp_path / "scores.svg").read_bytes()


def test_tables_have_lambda_across_and_books_down_with_intervals_in_a_second_one(report):
    lines = report.to_markdown().splitlines()
    heads = [number for number, line in enumerate(lines) if line == "| book | λ = 0 | λ = −0.5 | λ = −1 |"]
    score = report.score("lamps", -1.0)
    plain, whole = (lines[head + 2 : head + 4] for head in heads[:2])
    for rows in (plain, whole):
        assert [line.split(" | ")[0] for line in rows] == ["| lamps", "| boats"]
    assert plain[0].removesuffix(" |").split(" | ")[3] == f"{score.value.value:.3f}"
    assert lines[heads[1] - 2] == "<details><summary>With intervals and changes</summary>"
    cell = whole[0].split(" | ")[3]
    assert f"{score.value.value:.4f}" in cell
    assert f"({100 * score.relative.value:+.2f} %".replace("-", "−") in cell
    assert "[" in whole[0].split(" | ")[1] and "[" not in plain[0]


def test_a_notebook_shows_books_and_scores_with_the_chosen_lambda_marked(three):
    shown = three._repr_html_()
    tree = ElementTree.fromstring(shown)  # well-formed
    table = [["".join(cell.itertext()) for cell in row] for row in tree.iter("tr")]
    assert table[0] == ["book", "λ = 0", "λ = −0.5", "λ = −1✓ chosen", "reference"]
    assert [row[0] for row in table[1:]] == ["lamps forget", "candles aligned", "boats retain"]
    value = three.score("candles", -1.0).value
    assert table[2][3] == f"{value.value:.4f}[{value.low:.4f}, {value.high:.4f}]"
    assert all("background" in row[3].get("style") for row in tree.iter("tr"))
    assert sum("background" in cell.get("style") for row in tree.iter("tr") for cell in row) == 4
    assert f"{three.choice.reason}." in "".join(tree.itertext())
    assert three.protocol.id in shown and "http" not in shown and "src=" not in shown


def test_a_notebook_shows_names_as_text_and_says_why_no_lambda_is_chosen(report):
    name = "<b onclick='x()'>&"
    info = replace(report.books[0], name=name, role="retain")
    scores = tuple(replace(s, book=name) if s.book == "lamps" else s for s in report.scores)
    shown = replace(report, books=(info, report.books[1]), scores=scores, choice=None)._repr_html_()
    assert name not in shown and "&lt;b onclick=&#x27;x()&#x27;&gt;&amp;" in shown
    assert f"{report.score('lamps', 0.0).value.value:.4f}" in shown
    assert "No book is marked as one to forget, so no λ is chosen." in shown and "chosen</th>" not in shown


def test_the_plots_are_figures_and_those_are_what_is_saved(report, tmp_path):
    from matplotlib.figure import Figure

    from hf_taskvec.figures import render

    drawn = report.figures()
    assert list(drawn) == ["scores", "pareto", "samples"] and all(isinstance(f, Figure) for f in drawn.values())
    report.save(tmp_path)
    assert all((tmp_path / name).read_bytes() == data for name, data in render(drawn).items())


def test_two_protocols_never_share_a_table(report):
    other = replace(report, protocol=protocols.get(prompt_length=14, answer_length=9, samples=12))
    with pytest.raises(MismatchError, match="not comparable"):
        compare_reports({"a": report, "b": other})
    both = compare_reports({"a": report, "b": report})
    assert "| a: lamps |" in both and "| b: boats |" in both


def test_a_stopped_sweep_continues_and_gives_the_same_report(made, tmp_path):
    tokenizer, books, base, joint, single = made

    class StopError(Exception):
        pass

    def go(folder, stop_after=None):
        model = copy.deepcopy(joint)
        if stop_after is not None:
            left = [stop_after]

            def count(*_):
                left[0] -= 1
                if left[0] < 0:
                    raise StopError

            count.fingerprint = ""  # it changes nothing, so what is finished can be found again
            model.model.register_forward_pre_hook(count)
        edit = edit_of(model, base, single)
        return sweep(model, edit, SCALES, books, SHORT, tokenizer=tokenizer, output=folder, batch_size=5, **FAST)

    whole = go(tmp_path / "whole")
    with pytest.raises(StopError):
        go(tmp_path / "parts", stop_after=120)
    kept = len(list((tmp_path / "parts" / "store").glob("*.json")))
    assert kept > 0 and not (tmp_path / "parts" / "report.json").exists()
    rest = go(tmp_path / "parts")
    assert rest.timing.reused > 0 and rest.timing.reused + rest.timing.generated == whole.timing.generated
    assert replace(rest, timing=whole.timing) == whole
    assert (tmp_path / "parts" / "scores.svg").read_bytes() == (tmp_path / "whole" / "scores.svg").read_bytes()
    again = go(tmp_path / "parts")
    assert again.timing.generated == 0


def test_a_retrained_reference_sets_the_never_seen_level(made):
    tokenizer, books, base, joint, single = made
    model = copy.deepcopy(joint)
    retrained = train(copy.deepcopy(base), tokenizer, books[1:], 60)  # never saw the book to forget
    args = {"tokenizer": tokenizer, "reference": retrained, **FAST}
    found = sweep(model, edit_of(model, base, single), [-1], books, SHORT, **args)
    assert found.choice.never_seen == NeverSeen("reference", "reference")
    assert found.references[0].model != found.model
    assert found.choice.candidates[0].target < found.choice.candidates[0].forget
    verdict = found.choice.verdict
    assert [m.metric for m in verdict.metrics] == list(Criteria().metrics)
    assert all(m.gap.value > 0 for m in verdict.metrics)
    text = found.to_markdown()
    assert "| Extraction strength |" in text and "| Membership AUC |" in text
    assert list(found.figures()) == ["scores", "forgetting", "pareto", "samples"]  # R has a plot where it has values


def test_reference_models_are_shown_under_their_names_and_the_first_one_decides(made):
    tokenizer, books, base, joint, _ = made
    retrained = train(copy.deepcopy(base), tokenizer, books[1:], 60)
    both = {"retrained without lamps": retrained, "base": base}
    found = sweep(joint, None, [0], books, SHORT, tokenizer=tokenizer, reference=both, **FAST)
    assert [info.name for info in found.references] == list(both)
    assert found.choice.never_seen.name == "retrained without lamps"
    for name, other in both.items():
        alone = sweep(other, None, [0], books, SHORT, tokenizer=tokenizer, **FAST)
        for score in alone.scores:
            twin = next(
                s
                for s in found.reference_scores
                if (s.reference, s.book, s.split, s.metric) == (name, score.book, score.split, score.metric)
            )
            assert (twin.value, twin.n) == (score.value, score.n)
            ours = found.score(score.book, 0.0, score.metric, score.split).value.value
            assert twin.difference.value == pytest.approx(score.value.value - ours)
        texts = [next(r.output for r in p.references if r.reference == name) for p in found.passages]
        assert texts == [p.at[0].output for p in alone.passages]
    assert found.timing.generated == 3 * len(found.passages)
    text = found.to_markdown()
    assert "| book | λ = 0 | reference: retrained without lamps | reference: base |" in text
    assert "the reference model “retrained without lamps”, on the same passages" in text
    assert {m.reference for m in found.reference_membership} == set(both)
    assert UnlearningReport.from_dict(found.to_dict()) == found


def test_a_reference_without_a_name_claims_nothing(three):
    text = three.to_markdown()
    assert "comes from the reference model, on the same passages" in text
    assert "| λ = −1 | reference |" in text and "retrained" not in text


def test_without_a_reference_the_never_seen_level_is_assumed_to_be_that_of_held_out_text(report):
    assert report.choice.never_seen.source == "assumed"
    assert "*assumption*" in report.to_markdown()


@pytest.mark.parametrize("make", [tiny_llama, tiny_gpt2])
@pytest.mark.parametrize("name", ["ssu-v1", "ssu-v1-pypi", "ssu-v2"])
def test_the_long_protocols_run_on_a_long_context(make, name, tokenizer):
    books = [replace_blocks(2000)]
    protocol = protocols.get(name, samples=2)
    if name.startswith("ssu-v1"):  # our tokenizer needs about five tokens for a word of this story
        protocol = replace(protocol, decoding=protocols.Decoding(total_length=1500))
    found = sweep(make(context=2500), None, [0], books, protocol, tokenizer=tokenizer, **FAST)
    assert {p.split for p in found.passages} == {"seen", "held_out"}
    assert len(found.passages[0].prompt.split()) == protocol.prompt_length


def replace_blocks(words):
    import datasets

    return load_book(datasets.Dataset.from_dict({"text": [STORY]}), "story", role="forget", block_words=words)


def with_start_token(tokenizer):
    """A tokenizer that begins every text with a token of its own, as Llama's do."""
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    raw = copy.deepcopy(tokenizer.backend_tokenizer)
    raw.post_processor = TemplateProcessing(single="</s> $A", special_tokens=[("</s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="</s>", bos_token="</s>")


@pytest.mark.parametrize("start", [False, True], ids=["plain", "start token"])
@pytest.mark.parametrize("name", ["muse-verbmem", "open-unlearning"])
def test_muse_and_open_unlearning_recomputed_from_their_definitions(name, start, tokenizer):
    """Greedy, 128 new tokens, target cut to 128 tokens, rouge_score: with plain transformers, row by row."""
    import datasets
    from rouge_score.rouge_scorer import RougeScorer

    model = train(tiny_llama(context=512), tokenizer, make_books()[:1], 60)
    tokenizer = with_start_token(tokenizer) if start else tokenizer
    sentences = STORY.split(". ")
    pairs = {"prompt": [], "gt": []}
    for i in range(6):
        pairs["prompt"].append(". ".join(sentences[40 * i : 40 * i + 3 + i % 3]) + ".")
        pairs["gt"].append(". ".join(sentences[40 * i + 3 + i % 3 : 40 * i + 20]) + ".")
    book = load_book(datasets.Dataset.from_dict(pairs), "pairs", role="forget")
    found = sweep(model, None, [0], book, name, tokenizer=tokenizer, **FAST)
    muse = name == "muse-verbmem"
    scorer = RougeScorer(["rougeL"], use_stemmer=not muse)
    expected, targets = [], []
    for prompt, gt in zip(pairs["prompt"], pairs["gt"], strict=True):
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        mask = torch.ones_like(ids)
        out = model.generate(ids, attention_mask=mask, max_new_tokens=128, do_sample=False, pad_token_id=0)
        text = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        if muse:  # the start token is one of the 128
            cut = tokenizer(gt)["input_ids"][:128]
        else:  # the 128 tokens that follow those of the prompt
            cut = tokenizer(f"{prompt} {gt}")["input_ids"][ids.shape[1] : ids.shape[1] + 128]
        targets.append(tokenizer.decode(cut, skip_special_tokens=True).strip())
        expected.append((100 if muse else 1) * scorer.score(targets[-1], text)["rougeL"].fmeasure)
    assert [p.answer for p in found.passages] == targets
    got = [p.at[0].values["rouge_l"] for p in found.passages]
    assert got == pytest.approx(expected, abs=1e-6)
    assert found.choice.scale is None  # nothing held out, no reference: it says so
    assert "too few passages" in found.choice.reason


def test_bad_arguments_are_refused_before_any_work(made, tmp_path):
    tokenizer, books, _, joint, _ = made
    args = {"tokenizer": tokenizer, **FAST}
    with pytest.raises(MissingNameError, match="Did you mean 'taskvec-v1'"):
        sweep(joint, None, [0], books, "taskvec-v2", **args)
    with pytest.raises(BadValueError, match="nan is not a finite number"):
        sweep(joint, None, [float("nan")], books, SHORT, **args)
    with pytest.raises(BadValueError, match="two books are called 'lamps'"):
        sweep(joint, None, [0], [books[0], books[0]], SHORT, **args)
    with pytest.raises(BadValueError, match="at least one book"):
        sweep(joint, None, [0], [], SHORT, **args)
    with pytest.raises(MissingNameError, match="Did you mean 'rouge_l'"):
        sweep(joint, None, [0], books, SHORT, criteria=Criteria(metrics=("rogue_l",)), **args)
    with pytest.raises(BadValueError, match=r"vector\.edit\(model\)"):
        sweep(joint, object(), [0], books, SHORT, **args)
    for wrong in ({"level": 1.5}, {"permutations": 0}, {"batch_size": 0}):
        with pytest.raises(BadValueError, match=next(iter(wrong))):
            sweep(joint, None, [0], books, SHORT, **{**args, **wrong})
    with pytest.raises(BadValueError, match="pass its tokenizer="):
        sweep(joint, None, [0], books, SHORT)
    with pytest.raises(BadValueError, match="context has 256"):
        sweep(joint, None, [0], books, "ssu-v2", **args)
    small = tiny_llama()
    small.resize_token_embeddings(300)
    wrong_tokens = r"ids up to 3\d\d for these passages.*vocabulary has 300 entries.*resize_token_embeddings"
    with pytest.raises(MismatchError, match=wrong_tokens):
        sweep(small, None, [0], books, SHORT, **args)
    with pytest.raises(MismatchError, match=wrong_tokens):
        sweep(joint, None, [0], books, SHORT, reference=small, store=tmp_path / "store", **args)
    assert not (tmp_path / "store").exists()
    small.config._name_or_path = str(tmp_path)
    small.save_pretrained(tmp_path)
    with pytest.raises(MissingFileError, match="has no tokenizer"):
        sweep(small, None, [0], books, SHORT)
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(OutputError, match="cannot be written"):
        sweep(joint, None, [0], books, SHORT, output=tmp_path / "taken", **args)
    with pytest.raises(OutputError, match="cannot be written"):
        sweep(joint, None, [0], books, SHORT, output=tmp_path / "taken" / "below", **args)


AS_NOBODY = """
import os, sys, traceback
from pathlib import Path
from hf_taskvec.errors import OutputError
from hf_taskvec.atomic import ensure_writable
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
try:
    ensure_writable(Path(sys.argv[1]).absolute())
except OutputError:
    traceback.print_exc(file=sys.stdout)
"""


@pytest.mark.parametrize("path", ["locked", "locked/new"])
def test_a_folder_without_the_right_to_write_is_named_but_not_its_path(tmp_path, path):
    """For root every folder is writable, so the check runs as nobody."""
    (tmp_path / "locked").mkdir()
    (tmp_path / "locked").chmod(0o555)
    tmp_path.chmod(0o755)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", AS_NOBODY, path]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    name = path.split("/")[-1]
    assert f"the folder {name!r} cannot be written: Permission denied. Name another one" in done.stdout, done.stderr
    assert str(tmp_path) not in done.stdout


def test_a_damaged_report_is_named(report, tmp_path):
    report.save(tmp_path, plots=False)
    path = tmp_path / "report.json"
    text = path.read_text()
    path.write_text(text[:1000])
    with pytest.raises(CorruptFileError, match=r"report\.json is damaged"):
        UnlearningReport.load(path)
    path.write_text(text.replace(f'"version": {REPORT_VERSION},', '"version": 99,', 1))
    with pytest.raises(CorruptFileError, match="version 99"):
        UnlearningReport.load(path)
    with pytest.raises(MissingFileError, match="no report"):
        UnlearningReport.load(tmp_path / "none")
    with pytest.raises(MissingNameError, match="Did you mean 'lamps'"):
        report.score("lamp", 0.0)


def test_a_progress_bar_is_shown_when_asked_for(made, capfd):
    tokenizer, books, _, joint, _ = made
    few = protocols.get(SHORT, samples=2)
    for progress in (None, False, True):
        sweep(joint, None, [0], books, few, tokenizer=tokenizer, progress=progress, **FAST)
        assert ("batches: 100%" in capfd.readouterr().err) == (progress is True)  # this is no terminal


def test_trackers_get_the_scores(made, tmp_path):
    from accelerate.tracking import GeneralTracker

    lines = []

    class Notes(GeneralTracker):
        name = "notes"
        requires_logging_directory = False
        main_process_only = True

        @property
        def tracker(self):
            return None

        def store_init_configuration(self, values):
            pass

        def log(self, values, step=None, **kwargs):
            lines.append((step, values))

    tokenizer, books, _, joint, _ = made
    found = sweep(joint, None, [0, -1], books, SHORT, tokenizer=tokenizer, log_with=Notes(), **FAST)
    assert [step for step, _ in lines] == [0, 1]
    assert lines[0][1]["lamps/seen/rouge_l"] == found.score("lamps", 0.0).value.value
