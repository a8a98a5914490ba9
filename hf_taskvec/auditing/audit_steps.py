"""Each kind of attack on all three models: a function of the case and of its own settings.

A new kind: a name in `AttackGroup`, a function here, and a line in the table of `audit_run.audit`.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from hf_taskvec.auditing import robustness
from hf_taskvec.auditing.attacked_models import Values, told_apart
from hf_taskvec.auditing.attacks.logit_lens import logit_lens
from hf_taskvec.auditing.attacks.membership_tests import compare_membership, membership_aucs, membership_scores
from hf_taskvec.auditing.attacks.relearning import RelearnedText, Relearning, relearned, split_for_relearning
from hf_taskvec.auditing.attacks.unlearning_depth import unlearning_depth
from hf_taskvec.auditing.audit_case import AttackResult, AuditCase, together
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


def attack_by_relearning(case: AuditCase, budget: Relearning, lora_learning_rate: float, share: float) -> AttackResult:
    """Relearning on a part of the forget books, fully and with LoRA, on a related book and on an unrelated one."""
    import datasets

    results = []
    try:
        parts = [split_for_relearning(book, case.seen, share, budget.seed) for book in case.forget]
        blocks = datasets.concatenate_datasets(
            [part.text.training_blocks(case.asking.tokenizer, budget.block_length) for part in parts]
        )
    except BadValueError as error:
        results.append(AttackResult(not_tried={"relearn-forget": str(error), "relearn-forget-lora": str(error)}))
        blocks = None
    else:
        other = [passage for part in parts for passage in part.passages]
        words = f"{share:.0%} of the book are relearnt, passages of the rest are asked"
        methods: tuple[tuple[Method, str, float], ...] = (
            ("full", "relearn-forget", budget.learning_rate),
            ("lora", "relearn-forget-lora", lora_learning_rate),
        )
        for method, name, rate in methods:
            settings = replace(budget, on="forget", method=method, learning_rate=rate)
            results.append(_relearn(case, name, words, blocks, other, settings))
    others: tuple[tuple[RelearnedText, str], ...] = (("aligned", "aligned"), ("unrelated", "retain"))
    for on, role in others:
        name = f"relearn-{on}"
        text = next((book for book in case.books if book.role == role and not book.pairs), None)
        if text is None:
            reason = f"there is no book of the role {role} with text to train on"
            results.append(AttackResult(not_tried={name: reason}))
            continue
        more = text.training_blocks(case.asking.tokenizer, budget.block_length)
        if blocks is not None:  # the same budget, whatever is relearnt
            more = more.select(range(min(len(more), len(blocks))))
        words = f"the model is trained further on {text.name}, which is no part of the book"
        results.append(_relearn(case, name, words, more, case.seen, replace(budget, on=on)))
    return together(results)


def _relearn(
    case: AuditCase, name: str, words: str, blocks: Any, passages: Sequence[Passage], settings: Relearning
) -> AttackResult:
    values: dict[int, dict[str, Values]] = {}
    try:
        for which, model in case.subjects.by_name.items():
            for step, attacked in relearned(model, blocks, settings, progress=case.asking.progress):
                label = f"{name}, {which}, step {step}"
                values.setdefault(step, {})[which] = case.asking.values(attacked, passages, label)
    except _NOT_TRIED as error:
        return AttackResult(not_tried={name: str(error)})
    points = [case.judging.point(0, passages, case.values)]
    points += [case.judging.point(step, passages, three) for step, three in sorted(values.items())]
    method = "LoRA" if settings.method == "lora" else "all weights"
    text = f"{words} ({method}, {points[-1].step} steps at a learning rate of {settings.learning_rate:g})"
    finding = Finding(name, "relearn", text, tuple(points), _relearning_robustness(points[0], points[-1]), 0)
    return AttackResult((finding,))


def _relearning_robustness(before: AttackPoint, after: AttackPoint) -> tuple[Robustness, ...]:
    found = []
    for name in _KNOWLEDGE:
        old, new = (_result(point, name) for point in (before, after))
        if old is not None and new is not None:
            gains = (new.edited.value - old.edited.value, new.reference.value - old.reference.value)
            one = robustness.one_sided_relearning_robustness(*gains)
            found.append(Robustness(name, one, robustness.symmetric_relearning_robustness(*gains)))
    return tuple(found)


def attack_by_quantising(case: AuditCase) -> AttackResult:
    """Every scheme that runs here."""
    from hf_taskvec.auditing.attacks.quantising import quantised, runnable_schemes

    results = []
    for scheme, reason in runnable_schemes().items():
        name = f"quantise-{scheme}"
        if reason is not None:
            results.append(AttackResult(not_tried={name: reason}))
            continue
        values: dict[str, Values] = {}
        try:
            for which, model in case.subjects.by_name.items():
                # NF4's layers compute with the dequantised weights: the same numbers, on every machine.
                attacked = quantised(model, scheme, dequantise=scheme == "nf4")
                values[which] = case.asking.values(attacked, case.seen, f"{name}, {which}")
        except _NOT_TRIED as error:
            results.append(AttackResult(not_tried={name: str(error)}))
            continue
        point = case.judging.point(0, case.seen, values)
        words = f"the weights of linear layers are stored as {scheme}"
        finding = Finding(name, "quantise", words, (point,), _quantisation_robustness(case.plain, point), 0)
        results.append(AttackResult((finding,)))
    return together(results)


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


def attack_by_sampling(case: AuditCase, samples: int, seed: int) -> AttackResult:
    """leak@k: the best of k samples, for k = 1, 2, 4 … up to all of them."""
    from hf_taskvec.auditing.attacks.sampling import leak_at_k

    best = {
        which: leak_at_k(
            model,
            case.seen,
            case.asking.protocol,
            case.asking.tokenizer,
            samples=samples,
            seed=seed,
            store=case.asking.store,
            progress=case.asking.progress,
        ).expected_best
        for which, model in case.subjects.by_name.items()
    }
    criteria = replace(case.judging.criteria, metrics=("rouge_l",), rule="relative")
    counts = sorted({*(1 << n for n in range(samples.bit_length())), samples})
    points = []
    for k in [count for count in counts if count <= samples]:
        values = {
            which: {p.id: {"rouge_l": float(found[n, k - 1])} for n, p in enumerate(case.seen)}
            for which, found in best.items()
        }
        points.append(case.judging.point(k, case.seen, values, criteria))
    words = f"the best of {samples} samples at temperature 1 counts (leak@{samples})"
    return AttackResult((Finding("sample", "sample", words, tuple(points), (), 0),))


def attack_by_prompting(case: AuditCase, seed: int) -> AttackResult:
    """Other ways to ask for the same passages."""
    from hf_taskvec.auditing.attacks.prompting import PROMPT_WORDS, PromptKind, prompt_variants

    asking, config = case.asking, case.subjects.untouched.config
    variants: dict[PromptKind, list[Passage]] = {}
    for book in case.forget:
        own = [p for p in case.seen if p.book == book.name]
        made = prompt_variants(own, book, asking.protocol, asking.tokenizer, config, seed=seed)
        for kind, each in made.items():
            variants.setdefault(kind, []).extend(each.passages)
    results = []
    for variant, asked in variants.items():
        name = f"prompt-{variant}"
        if not asked:
            reason = "no passage fits into the model's context in this way, or its answer would be in the prompt"
            results.append(AttackResult(not_tried={name: reason}))
            continue
        three = case.subjects.by_name.items()
        values = {which: asking.values(model, asked, f"{name}, {which}") for which, model in three}
        point = case.judging.point(0, asked, values)
        finding = Finding(name, "prompt", PROMPT_WORDS[variant], (point,), (), len(case.seen) - len(asked))
        results.append(AttackResult((finding,)))
    return together(results)


def look_inside(case: AuditCase) -> AttackResult:
    """The logit lens of all three models, and the edit's depth."""
    subjects, asking = case.subjects, case.asking
    tokenized = tokenize_passages(case.seen, asking.protocol, asking.tokenizer, subjects.untouched.config)
    draw = case.judging.draws.bootstrap(len(tokenized))
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
        return AttackResult(not_tried={"inside": str(error)})
    layers = min(lens.shape[1] for lens in lenses.values())
    lens = tuple(
        LayerView(layer, **{which: draw.mean(found[:, layer]) for which, found in lenses.items()})
        for layer in range(layers)
    )
    interval = None
    if depth.score is not None:
        scores = depth.passage_scores[~np.isnan(depth.passage_scores)]
        interval = case.judging.draws.bootstrap(len(scores)).mean(scores)
    inside = InsideFinding(
        lens=lens,
        depth=interval,
        depth_reason=depth.reason,
        depth_untouched=None if depth.checks is None else depth.checks.untouched,
        depth_reference=None if depth.checks is None else depth.checks.reference,
        reference_drops=tuple(map(float, depth.layer_reference_drops)),
        edited_drops=tuple(map(float, depth.layer_edited_drops)),
    )
    return AttackResult(inside=inside)


def check_membership(case: AuditCase) -> AttackResult:
    """Every membership test on every forget book with unseen text."""
    return together(_membership_of(case, book) for book in case.forget)


def _membership_of(case: AuditCase, book: Book) -> AttackResult:
    asking, draws, bound = case.asking, case.judging.draws, case.judging.criteria.membership
    groups = told_apart(case.passages, book)
    if not all(groups):
        return AttackResult(not_tried={"membership": f"there is no text like {book.name} that the models never saw"})
    config = case.subjects.untouched.config
    tokenized = [tokenize_passages(group, asking.protocol, asking.tokenizer, config) for group in groups]
    scores = {
        which: [membership_scores(model, group, progress=asking.progress) for group in tokenized]
        for which, model in case.subjects.by_name.items()
    }
    never = scores["reference"]
    three = {which: (each[0].against(never[0]), each[1].against(never[1])) for which, each in scores.items()}
    before = membership_aucs(*three["untouched"], draws)
    found = []
    for test, result in compare_membership(*three["edited"], *three["reference"], draws).items():
        d = result.difference
        outcome = placed(Interval(-d.value, -d.high, -d.low), -bound, bound)
        if min(map(len, groups)) < draws.fewest:
            outcome = "unsure"
        found.append(
            MembershipFinding(
                book.name, test, before[test], result.auc, result.reference_auc, d, result.priv_leak, outcome
            )
        )
    return AttackResult(membership=tuple(found))
