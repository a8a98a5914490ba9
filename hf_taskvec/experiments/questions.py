"""Questions that one asks before merging, answered from one's own checkpoints: `recipes/analyze.py --ask`.

- Is epoch 1 enough? (Zhou et al. 2025: vectors of one epoch merge about as well as converged ones.)
- How much weight decay? (Kuzborskij and Abbasi-Yadkori: with it, networks of different tasks can be summed.)
- Which λ without validation? (The MIMA paper takes 0.4 for a sum of task vectors.)

Everything is judged by the loss of the next token on rows of text, one text for each task. Where a λ is chosen on text,
every other row chooses and the rest is reported.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
import torch

from hf_taskvec.algebra.task_vector import TaskVector
from hf_taskvec.analysis import EditedModel, correlation_matrix, stable_ranks
from hf_taskvec.analysis.markdown_report import MarkdownReport
from hf_taskvec.analysis.report_sections import BaseAndTexts
from hf_taskvec.analysis.token_batches import batches, row_losses
from hf_taskvec.analysis.token_rows import TokenRows
from hf_taskvec.errors import BadValueError
from hf_taskvec.evaluation.reporting.number_formats import format_interval, format_number
from hf_taskvec.evaluation.scoring.statistics import Array, Bootstrap, Interval
from hf_taskvec.models.model_facts import input_device
from hf_taskvec.progress import progress_bar

#: λ of θ_0 + λ Στ that are tried
GRID = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
#: what the MIMA paper takes without validation text
FIXED = 0.4
_GENERATED = 16  # rows that each fine-tune writes, for agreement
_LENGTH = 64  # and their length

Losses = Mapping[str, torch.Tensor]  # of each row of each task's text


def total(vectors: Sequence[TaskVector]) -> TaskVector:
    """Στ."""
    found = vectors[0]
    for vector in vectors[1:]:
        found = found + vector
    return found


def losses_at(texts: BaseAndTexts, vector: TaskVector, scale: float, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """The losses of θ_0 + λτ on the rows of some tasks."""
    with vector.applied_to(texts.model, scale):
        return {name: row_losses(texts.model, texts.rows[name], texts.batch_size) for name in names}


def mean_of(losses: Losses) -> Interval:
    """The mean over tasks, each of which counts the same, with a bootstrap interval over rows."""
    return _combined(losses, None)


def difference(one: Losses, other: Losses) -> Interval:
    """How much higher the mean over tasks is, paired by rows."""
    return _combined(one, other)


def _combined(one: Losses, other: Losses | None) -> Interval:
    boots = {name: Bootstrap(len(values)) for name, values in one.items()}

    def drawn(losses: Losses) -> Array:
        return np.mean([boots[name].means(values) for name, values in losses.items()], axis=0)

    def mean(losses: Losses) -> float:
        return fmean(values.mean().item() for values in losses.values())

    value, spread = mean(one), drawn(one)
    if other is not None:
        value, spread = value - mean(other), spread - drawn(other)
    return next(iter(boots.values())).interval(value, spread)


def _half(losses: Losses, start: int) -> dict[str, torch.Tensor]:
    return {name: values[start::2] for name, values in losses.items()}


def _check_rows(texts: BaseAndTexts) -> None:
    for name, rows in texts.rows.items():
        if len(rows) < 4:
            raise BadValueError(
                f"the text of {name} gives {len(rows)} rows, and 4 are needed: two to choose λ by, two to report. Use "
                "a longer text, or a smaller --max-length."
            )


# Is epoch 1 enough?


def ask_epochs(report: MarkdownReport, epochs: Mapping[str, Sequence[TaskVector]], texts: BaseAndTexts) -> str:
    """Merge the vectors of each epoch, and compare the first with the last.

    Args:
        report (`MarkdownReport`):
            Gets a section.
        epochs (`Mapping`):
            For each task its vectors after each epoch, as many for each.
        texts (`BaseAndTexts`):
            θ_0, and a text for each task that was not trained on.

    Returns:
        `str`: The answer.
    """
    _check_rows(texts)
    names = list(epochs)
    count = len(epochs[names[0]])
    single = len(names) == 1
    report.begin_section(
        "Is epoch 1 enough?",
        "The loss of the next token after each epoch, in nats, on text that was not trained on: of each task's own "
        "model on its own text"
        + ("." if single else ", and of θ₀ + λ·Στ over all texts, with λ chosen on every other row.")
        + " Differences to the last epoch are paired, with 95 % bootstrap intervals over rows.",
    )
    own, merged, scales = [], [], []
    for number in progress_bar(range(count), "Epochs", None, unit="epoch"):
        vectors = [epochs[name][number] for name in names]
        alone: dict[str, torch.Tensor] = {}
        for name, vector in zip(names, vectors, strict=True):
            alone |= losses_at(texts, vector, 1.0, [name])
        own.append({name: values[1::2] for name, values in alone.items()})
        if single:
            continue
        tried = {scale: losses_at(texts, total(vectors), scale, names) for scale in GRID[1:]}
        scale = min(tried, key=lambda each: mean_of(_half(tried[each], 0)).value)
        merged.append(_half(tried[scale], 1))
        scales.append(scale)
    judged = own if single else merged
    head = ["epoch", "own models", *([] if single else ["merged", "λ"]), "more than after the last"]
    rows = []
    for number in range(count):
        cells = [str(number + 1), format_interval(mean_of(own[number]), 3)]
        if not single:
            cells += [format_interval(mean_of(merged[number]), 3), f"{scales[number]:g}"]
        last = number == count - 1
        rows.append([*cells, "–" if last else format_interval(difference(judged[number], judged[-1]), 3)])
    report.add_table(head, rows)
    what = "own model" if single else "merged model"
    gap = difference(judged[0], judged[-1])
    best = min(range(count), key=lambda each: mean_of(judged[each]).value) + 1
    told = format_interval(gap, 3)
    if gap.high <= 0:
        answer = f"Yes: the {what} of epoch 1 is better than that of epoch {count} (loss {told} nats)."
    elif gap.low > 0:
        answer = f"No: the {what} of epoch 1 is worse than that of epoch {count} (loss {told} nats more)."
    else:
        answer = f"These texts do not tell: the {what} of epoch 1 has a loss of {told} nats more than epoch {count}'s."
    answer += f" The lowest loss is after epoch {best}."
    report.add_text(f"**{answer}**")
    return answer


# How much weight decay?


@dataclass(frozen=True)
class DecayedTask:
    """A fine-tune of a task at some weight decay.

    Args:
        decay (`float`):
            The weight decay that it was trained with.
        task (`str`):
            The task, as the texts call it.
        vector (`TaskVector`):
            Its vector.
    """

    decay: float
    task: str
    vector: TaskVector


def ask_decay(
    report: MarkdownReport, tuned: Sequence[DecayedTask], texts: BaseAndTexts, config: Mapping[str, Any]
) -> str:
    """Merge the fine-tunes of each weight decay, by their sum and by their mean, and compare.

    Args:
        report (`MarkdownReport`):
            Gets a section.
        tuned (`Sequence` of `DecayedTask`):
            The same tasks at each weight decay.
        texts (`BaseAndTexts`):
            θ_0, and a text for each task that was not trained on.
        config (`Mapping`):
            The base's.

    Returns:
        `str`: The answer.
    """
    decays = sorted({each.decay for each in tuned})
    tasks = list(dict.fromkeys(each.task for each in tuned))
    report.begin_section(
        "How much weight decay?",
        "The loss of the next token, in nats, on text that was not trained on: of each task's own model on its own "
        "text, and of θ₀ + Στ and θ₀ + Στ/n over all texts. The stable rank, ‖W‖_F / ‖W‖₂, is that of the vectors "
        "(harmonic mean); weight decay is said to lower it, and so to let networks be summed.",
    )
    rows, means, best = [], {}, {}
    for decay in progress_bar(decays, "Weight decays", None):
        vectors = {each.task: each.vector for each in tuned if each.decay == decay}
        own: dict[str, torch.Tensor] = {}
        for name, vector in vectors.items():
            own |= losses_at(texts, vector, 1.0, [name])
        whole = total(list(vectors.values()))
        summed = losses_at(texts, whole, 1.0, tasks)
        averaged = losses_at(texts, whole, 1 / len(tasks), tasks)
        means[decay] = min((summed, averaged), key=lambda each: mean_of(each).value)
        best[decay] = mean_of(means[decay]).value
        ranks = fmean(stable_ranks(vector, config=config).harmonic_mean() for vector in vectors.values())
        norm = fmean(vector.norm() for vector in vectors.values())
        cells = [format_interval(mean_of(each), 3) for each in (own, summed, averaged)]
        rows.append([f"{decay:g}", f"{norm:.3g}", f"{ranks:.2f}", *cells])
    report.add_table(["weight decay", "norm", "stable rank", "own models", "summed", "averaged"], rows)
    chosen, least = min(best, key=lambda each: best[each]), decays[0]
    gap = difference(means[least], means[chosen])
    if chosen == least:
        nearest = min(decays[1:], key=lambda each: best[each])
        gap = difference(means[nearest], means[chosen])
        answer = f"{chosen:g}, the least that was tried: the better merge at {nearest:g}"
    else:
        answer = f"{chosen:g}: the better merge at {least:g}"
    answer += f" has a loss of {format_interval(gap, 3)} nats more"
    answer += "." if gap.low > 0 else ", which these texts do not tell from none."
    report.add_text(f"**{answer}**")
    return answer


# Which λ without validation?


def ask_scale(report: MarkdownReport, vectors: Mapping[str, TaskVector], texts: BaseAndTexts, judged: bool) -> str:
    """The λ of θ_0 + λ Στ that several rules give without any text, judged on text where there is some.

    Args:
        report (`MarkdownReport`):
            Gets a section.
        vectors (`Mapping`):
            Of each task, by name.
        texts (`BaseAndTexts`):
            θ_0, and a text for each task if there are any.
        judged (`bool`):
            Whether there are texts.

    Returns:
        `str`: The answer.
    """
    names, whole = list(vectors), total(list(vectors.values()))
    report.begin_section(
        "Which λ without validation?",
        "λ of θ₀ + λ·Στ. *Agreement*: where the merged model's predictions are nearest, by their mean KL divergence, "
        "to each task's own model's, on text that this model writes itself. *Norm*: where λ·Στ is as long as the "
        "vectors are on average. *Margins*: where λ·(1 + Σα̂) reaches 1 for every task, as in the proof of Theorem 1 "
        "of Li et al. 2025, with α̂ relative to θ₀ on the same written text. 0.4 is what the MIMA paper takes.",
    )
    written = {name: written_rows(texts.model, vector) for name, vector in vectors.items()}
    away = agreement(texts.model, vectors, whole, written, texts.batch_size)
    models = {name: EditedModel(texts.model, vector) for name, vector in vectors.items()}
    alphas = correlation_matrix(models, written, relative_to=texts.model, pooling="sample")
    sums = [1 + sum(alphas[name, other] for other in names if other != name) for name in names]
    rules: dict[str, float | None] = {
        "agreement": min(away, key=lambda scale: away[scale]),
        "the mean, 1/n": 1 / len(names),
        "norm": fmean(vector.norm() for vector in vectors.values()) / whole.norm(),
        "margins": max(1 / each for each in sums) if min(sums) > 0 else None,
        "0.4": FIXED,
    }
    answer = f"λ = {rules['agreement']:g}, where the merged model agrees most with the {len(names)} own models."
    if not judged:
        report.add_table(["rule", "λ"], [[rule, _number(scale)] for rule, scale in rules.items()])
        report.add_text(f"**{answer}** Texts (`--data`) would tell how good each of them is.")
        return answer
    scales = sorted({*GRID, *(scale for scale in rules.values() if scale is not None)})
    tried = {scale: losses_at(texts, whole, scale, names) for scale in progress_bar(scales, "Scales", None)}
    best = min(tried, key=lambda scale: mean_of(tried[scale]).value)
    rows = []
    for rule, scale in (*rules.items(), ("the best on these texts", best), ("θ_0", 0.0)):
        if scale is None:
            rows.append([rule, "none: a task's α̂ with the others adds up to −1 or less", "–", "–"])
            continue
        gap = "–" if scale == best else format_interval(difference(tried[scale], tried[best]), 3)
        rows.append([rule, _number(scale), format_interval(mean_of(tried[scale]), 3), gap])
    report.add_table(["rule", "λ", "loss on the texts", "more than at the best"], rows)
    found = rules["agreement"]
    assert found is not None
    lost = mean_of(tried[found]).value - mean_of(tried[best]).value
    answer += f" On the texts that were given, λ = {best:g} is best, and this one loses {format_number(lost, 3)} nats."
    report.add_text(f"**{answer}**")
    return answer


def _number(scale: float | None) -> str:
    return "–" if scale is None else format_number(scale, 2)


def written_rows(model: Any, vector: TaskVector) -> TokenRows:
    """Rows that a fine-tuned model writes by itself, from the beginning of a text, sampled as it predicts."""
    config = model.config
    start = config.bos_token_id if config.bos_token_id is not None else config.eos_token_id
    if isinstance(start, list):
        start = start[0]
    ids = torch.full((_GENERATED, 1), 0 if start is None else int(start), device=input_device(model))
    draw = torch.Generator().manual_seed(0)
    with vector.applied_to(model), torch.inference_mode():
        past = None
        for _ in range(_LENGTH - 1):
            found = model(input_ids=ids if past is None else ids[:, -1:], past_key_values=past, use_cache=True)
            past = found.past_key_values
            following = torch.multinomial(found.logits[:, -1].float().softmax(-1).cpu(), 1, generator=draw)
            ids = torch.cat([ids, following.to(ids.device)], dim=1)
    rows: TokenRows = ids.tolist()
    return rows


def agreement(
    model: Any,
    vectors: Mapping[str, TaskVector],
    whole: TaskVector,
    written: Mapping[str, TokenRows],
    batch_size: int,
) -> dict[float, float]:
    """For each λ the mean KL divergence of θ_0 + λ Στ from each task's own model, on what that model has written."""
    own = {}
    for name, vector in vectors.items():
        with vector.applied_to(model):
            own[name] = _log_probabilities(model, written[name], batch_size)
    found = {}
    for scale in progress_bar(GRID, "Agreement", None):
        with whole.applied_to(model, scale):
            found[scale] = fmean(
                _divergence(own[name], _log_probabilities(model, rows, batch_size)) for name, rows in written.items()
            )
    return found


def _log_probabilities(model: Any, rows: TokenRows, batch_size: int) -> torch.Tensor:
    parts = []
    for batch in batches(rows, batch_size):
        with torch.inference_mode():
            parts.append(model(**batch.inputs(model), use_cache=False).logits.float().log_softmax(-1).cpu())
    return torch.cat(parts)


def _divergence(own: torch.Tensor, merged: torch.Tensor) -> float:
    """KL(own ‖ merged), the mean over positions."""
    return (own.exp() * (own - merged)).sum(-1).mean().item()
