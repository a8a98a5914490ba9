"""Each kind of attack on all three models, and what came of it as findings."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from hf_taskvec.auditing import robustness
from hf_taskvec.auditing.attacked_models import Asking, Judging, Subjects, Values, told_apart
from hf_taskvec.auditing.attacks.logit_lens import logit_lens
from hf_taskvec.auditing.attacks.membership_tests import compare_membership, membership_aucs, membership_scores
from hf_taskvec.auditing.attacks.relearning import RelearnedText, Relearning, relearned, split_for_relearning
from hf_taskvec.auditing.attacks.unlearning_depth import unlearning_depth
from hf_taskvec.auditing.audit_parts import (
    AttackPoint,
    Finding,
    InsideFinding,
    LayerView,
    MembershipFinding,
    Robustness,
)
from hf_taskvec.errors import BadValueError, DivergedError, TaskVectorError, UnsupportedError
from hf_taskvec.evaluation.asking.batch_plan import tokenize_passages
from hf_taskvec.evaluation.scoring.statistics import Interval
from hf_taskvec.evaluation.scoring.verdict import placed
from hf_taskvec.evaluation.texts.books import Book
from hf_taskvec.evaluation.texts.passages import Passage
from hf_taskvec.training.settings import Method

# Scores from 0 upwards, by which robustness is stated.
_KNOWLEDGE = ("rouge_l", "exact_memorisation", "extraction_strength")
# One attack that cannot be made is not the end of the others; a model may also break under it: its logits are NaN.
_NOT_TRIED = (UnsupportedError, DivergedError, BadValueError)


def relearn_findings(
    subjects: Subjects,
    books: Sequence[Book],
    passages: Sequence[Passage],
    plain: Mapping[str, Values],
    asking: Asking,
    judging: Judging,
    budget: Relearning,
    rates: Mapping[str, float],
    share: float,
    not_tried: dict[str, str],
) -> list[Finding]:
    """Relearning on a part of the forget books, fully and with LoRA, on a related book and on an unrelated one."""
    import datasets

    forget = [book for book in books if book.role == "forget"]
    found = []
    try:
        parts = [split_for_relearning(book, passages, share, budget.seed) for book in forget]
        blocks = datasets.concatenate_datasets(
            [part.text.training_blocks(asking.tokenizer, budget.block_length) for part in parts]
        )
    except BadValueError as error:
        not_tried["relearn-forget"] = not_tried["relearn-forget-lora"] = str(error)
        blocks = None
    else:
        other = [passage for part in parts for passage in part.passages]
        words = f"{share:.0%} of the book are relearnt, passages of the rest are asked"
        methods: tuple[tuple[Method, str], ...] = (("full", "relearn-forget"), ("lora", "relearn-forget-lora"))
        for method, name in methods:
            settings = replace(budget, on="forget", method=method, learning_rate=rates[method])
            found += _relearn(name, words, subjects, blocks, other, plain, asking, judging, settings, not_tried)
    others: tuple[tuple[RelearnedText, str], ...] = (("aligned", "aligned"), ("unrelated", "retain"))
    for on, role in others:
        name = f"relearn-{on}"
        text = next((book for book in books if book.role == role and not book.pairs), None)
        if text is None:
            not_tried[name] = f"there is no book of the role {role} with text to train on"
            continue
        more = text.training_blocks(asking.tokenizer, budget.block_length)
        if blocks is not None:  # the same budget, whatever is relearnt
            more = more.select(range(min(len(more), len(blocks))))
        settings = replace(budget, on=on, learning_rate=rates["full"])
        words = f"the model is trained further on {text.name}, which is no part of the book"
        found += _relearn(name, words, subjects, more, passages, plain, asking, judging, settings, not_tried)
    return found


def _relearn(
    name: str,
    words: str,
    subjects: Subjects,
    blocks: Any,
    passages: Sequence[Passage],
    plain: Mapping[str, Values],
    asking: Asking,
    judging: Judging,
    settings: Relearning,
    not_tried: dict[str, str],
) -> list[Finding]:
    values: dict[int, dict[str, Values]] = {}
    try:
        for which, model in subjects.by_name.items():
            for step, attacked in relearned(model, blocks, settings, progress=asking.progress):
                label = f"{name}, {which}, step {step}"
                values.setdefault(step, {})[which] = asking.values(attacked, passages, label)
    except _NOT_TRIED as error:
        not_tried[name] = str(error)
        return []
    points = [judging.point(0, passages, plain)]
    points += [judging.point(step, passages, three) for step, three in sorted(values.items())]
    method = "LoRA" if settings.method == "lora" else "all weights"
    text = f"{words} ({method}, {points[-1].step} steps at a learning rate of {settings.learning_rate:g})"
    return [Finding(name, "relearn", text, tuple(points), _relearning_robustness(points[0], points[-1]), 0)]


def _relearning_robustness(before: AttackPoint, after: AttackPoint) -> tuple[Robustness, ...]:
    found = []
    for name in _KNOWLEDGE:
        old, new = (_result(point, name) for point in (before, after))
        if old is not None and new is not None:
            gains = (new.edited.value - old.edited.value, new.reference.value - old.reference.value)
            one = robustness.one_sided_relearning_robustness(*gains)
            found.append(Robustness(name, one, robustness.symmetric_relearning_robustness(*gains)))
    return tuple(found)


def quantise_findings(
    subjects: Subjects,
    passages: Sequence[Passage],
    plain: AttackPoint,
    asking: Asking,
    judging: Judging,
    not_tried: dict[str, str],
) -> list[Finding]:
    """Every scheme that runs here."""
    from hf_taskvec.auditing.attacks.quantising import quantised, runnable_schemes

    found = []
    for scheme, reason in runnable_schemes().items():
        name = f"quantise-{scheme}"
        if reason is not None:
            not_tried[name] = reason
            continue
        values: dict[str, Values] = {}
        try:
            for which, model in subjects.by_name.items():
                # NF4's layers compute with the dequantised weights: the same numbers, on every machine.
                attacked = quantised(model, scheme, dequantise=scheme == "nf4")
                values[which] = asking.values(attacked, passages, f"{name}, {which}")
        except _NOT_TRIED as error:
            not_tried[name] = str(error)
            continue
        point = judging.point(0, passages, values)
        words = f"the weights of linear layers are stored as {scheme}"
        found.append(Finding(name, "quantise", words, (point,), _quantisation_robustness(plain, point), 0))
    return found


def _quantisation_robustness(before: AttackPoint, after: AttackPoint) -> tuple[Robustness, ...]:
    found = []
    for name in _KNOWLEDGE:
        old, new = (_result(point, name) for point in (before, after))
        if old is not None and new is not None:
            levels = (old.edited.value, new.edited.value)
            one = robustness.one_sided_quantisation_robustness(*levels)
            found.append(Robustness(name, one, robustness.symmetric_quantisation_robustness(*levels)))
    return tuple(found)


def _result(point: AttackPoint, metric: str) -> Any:
    return next((result for result in point.results if result.metric == metric), None)


def sample_finding(
    subjects: Subjects, passages: Sequence[Passage], samples: int, asking: Asking, judging: Judging, seed: int
) -> Finding:
    """leak@k: the best of k samples, for k = 1, 2, 4 … up to all of them."""
    from hf_taskvec.auditing.attacks.sampling import leak_at_k

    best = {
        which: leak_at_k(
            model,
            passages,
            asking.protocol,
            asking.tokenizer,
            samples=samples,
            seed=seed,
            store=asking.store,
            progress=asking.progress,
        ).expected_best
        for which, model in subjects.by_name.items()
    }
    criteria = replace(judging.criteria, metrics=("rouge_l",), rule="relative")
    counts = sorted({*(1 << n for n in range(samples.bit_length())), samples})
    points = []
    for k in [count for count in counts if count <= samples]:
        values = {
            which: {p.id: {"rouge_l": float(found[n, k - 1])} for n, p in enumerate(passages)}
            for which, found in best.items()
        }
        points.append(judging.point(k, passages, values, criteria))
    words = f"the best of {samples} samples at temperature 1 counts (leak@{samples})"
    return Finding("sample", "sample", words, tuple(points), (), 0)


def prompt_findings(
    subjects: Subjects,
    books: Sequence[Book],
    passages: Sequence[Passage],
    asking: Asking,
    judging: Judging,
    not_tried: dict[str, str],
    seed: int,
) -> list[Finding]:
    """Other ways to ask for the same passages."""
    from hf_taskvec.auditing.attacks.prompting import PROMPT_WORDS, PromptKind, prompt_variants

    variants: dict[PromptKind, list[Passage]] = {}
    for book in books:
        if book.role == "forget":
            own = [p for p in passages if p.book == book.name]
            config = subjects.untouched.config
            made = prompt_variants(own, book, asking.protocol, asking.tokenizer, config, seed=seed)
            for kind, each in made.items():
                variants.setdefault(kind, []).extend(each.passages)
    found = []
    for variant, asked in variants.items():
        name = f"prompt-{variant}"
        if not asked:
            not_tried[name] = (
                "no passage fits into the model's context in this way, or its answer would be in the prompt"
            )
            continue
        values = {which: asking.values(model, asked, f"{name}, {which}") for which, model in subjects.by_name.items()}
        point = judging.point(0, asked, values)
        left_out = len(passages) - len(asked)
        found.append(Finding(name, "prompt", PROMPT_WORDS[variant], (point,), (), left_out))
    return found


def look_inside(
    subjects: Subjects, passages: Sequence[Passage], asking: Asking, judging: Judging, not_tried: dict[str, str]
) -> InsideFinding | None:
    """The logit lens of all three models, and the edit's depth."""
    tokenized = tokenize_passages(passages, asking.protocol, asking.tokenizer, subjects.untouched.config)
    draw = judging.draws.bootstrap(len(tokenized))
    try:
        lenses = {
            which: logit_lens(model, tokenized, progress=asking.progress).log_probs
            for which, model in subjects.by_name.items()
        }
        depth = unlearning_depth(
            edited=subjects.edited,
            untouched=subjects.untouched,
            reference=subjects.reference,
            passages=tokenized,
            progress=asking.progress,
        )
    except TaskVectorError as error:
        not_tried["inside"] = str(error)
        return None
    layers = min(lens.shape[1] for lens in lenses.values())
    lens = tuple(
        LayerView(layer, **{which: draw.mean(found[:, layer]) for which, found in lenses.items()})
        for layer in range(layers)
    )
    interval = None
    if depth.score is not None:
        scores = depth.passage_scores[~np.isnan(depth.passage_scores)]
        interval = judging.draws.bootstrap(len(scores)).mean(scores)
    return InsideFinding(
        lens=lens,
        depth=interval,
        depth_reason=depth.reason,
        depth_untouched=None if depth.checks is None else depth.checks.untouched,
        depth_reference=None if depth.checks is None else depth.checks.reference,
        reference_drops=tuple(map(float, depth.layer_reference_drops)),
        edited_drops=tuple(map(float, depth.layer_edited_drops)),
    )


def membership_findings(
    subjects: Subjects,
    passages: Sequence[Passage],
    forget: Sequence[Book],
    asking: Asking,
    judging: Judging,
    not_tried: dict[str, str],
) -> tuple[MembershipFinding, ...]:
    """Every membership test on every forget book with unseen text."""
    found = []
    for book in forget:
        groups = told_apart(passages, book)
        if not all(groups):
            not_tried["membership"] = f"there is no text like {book.name} that the models never saw"
            continue
        tokenized = [
            tokenize_passages(group, asking.protocol, asking.tokenizer, subjects.untouched.config) for group in groups
        ]
        scores = {
            which: [membership_scores(model, group, progress=asking.progress) for group in tokenized]
            for which, model in subjects.by_name.items()
        }
        never = scores["reference"]
        three = {which: (each[0].against(never[0]), each[1].against(never[1])) for which, each in scores.items()}
        before = membership_aucs(*three["untouched"], judging.draws)
        for test, result in compare_membership(*three["edited"], *three["reference"], judging.draws).items():
            d = result.difference
            bound = judging.criteria.membership
            outcome = placed(Interval(-d.value, -d.high, -d.low), -bound, bound)
            if min(map(len, groups)) < judging.draws.fewest:
                outcome = "unsure"
            found.append(
                MembershipFinding(
                    book.name, test, before[test], result.auc, result.reference_auc, d, result.priv_leak, outcome
                )
            )
    return tuple(found)
