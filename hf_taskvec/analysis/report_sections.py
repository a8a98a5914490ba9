"""What can be measured of some task vectors, as sections of one Markdown report with figures.

`recipes/analyze.py` puts the sections in order. What cannot be measured is named in its place, with the reason.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations, permutations
from pathlib import Path
from typing import Any

from hf_taskvec.algebra.expressions import label_for
from hf_taskvec.algebra.matrix_kinds import Kind, place_of
from hf_taskvec.algebra.task_vector import TaskVector
from hf_taskvec.analysis.correlations import CorrelationMatrix, correlation_matrix
from hf_taskvec.analysis.cosines import cosine_matrix
from hf_taskvec.analysis.edited_models import EditedModel
from hf_taskvec.analysis.gradients import gradient_alignment
from hf_taskvec.analysis.landscapes import loss_landscape
from hf_taskvec.analysis.linearity import cross_task_linearity
from hf_taskvec.analysis.markdown_report import MarkdownReport
from hf_taskvec.analysis.pooled_logits import Pooling
from hf_taskvec.analysis.ranks import MatrixRank, StableRanks, effective_ranks, large_rows, stable_ranks
from hf_taskvec.analysis.recommended_scales import PRACTICAL_MARGIN, recommend_scales
from hf_taskvec.analysis.scale_theorems import ScaleRegion
from hf_taskvec.analysis.token_rows import TokenRows
from hf_taskvec.errors import BadValueError

BASE = "the base"

NamedVectors = Mapping[str, TaskVector]


# From the weights alone.


def write_cosines(report: MarkdownReport, vectors: NamedVectors) -> None:
    """What the vectors are, their norms, and their cosines."""
    report.begin_section("The vectors")
    cosines = cosine_matrix(vectors) if len(vectors) > 1 else None
    norms = [vector.norm() for vector in vectors.values()] if cosines is None else cosines.norms
    rows = []
    for (name, vector), norm in zip(vectors.items(), norms, strict=True):
        kind = "low-rank" if vector.is_low_rank else "dense"
        rows.append([name, vector.provenance.origins[0].how, kind, str(len(vector)), f"{norm:.4g}"])
    report.add_table(["vector", "what it is", "kind", "parameters", "norm"], rows)
    if cosines is None:
        report.add_text("Cosines need two vectors or more.")
        return
    report.begin_section(
        "Cosines", "Near 0: the edits hardly touch each other. A cheap proxy of the tasks' correlation, below."
    )
    report.add_figure("cosines", cosines.figure, "cosines between the vectors")
    report.add_figure("cosines_by_layer", partial(cosines.figure, "layers"), "cosines and norms by layer")


def write_ranks(report: MarkdownReport, base: str | Path, vectors: NamedVectors, config: Mapping[str, Any]) -> None:
    """Stable ranks of the base and of each vector, effective ranks of low-rank ones, and large rows."""
    report.begin_section(
        "Stable ranks",
        "‖W‖_F / ‖W‖₂: 1 for a matrix of rank 1. The harmonic mean is over O, QKV and both matrices of the MLP in "
        "all layers. Large rows are the MLP's neurons whose change is at least a tenth of the largest one's.",
    )
    found: dict[str, StableRanks] = {BASE: stable_ranks(base)}
    for name, vector in vectors.items():
        measured = stable_ranks(vector, config=config) if any(map(place_of, vector)) else None
        if measured is not None and _changed(measured.matrices):
            found[name] = measured
        else:
            report.add_text(f"{name}: not applicable, because it changes no matrix of attention or of an MLP.")
    rows = []
    for name, each in found.items():
        by_kind = ", ".join(f"{kind} {_mean_rank(each, kind)}" for kind in each.kinds)
        rows.append([name, f"{each.harmonic_mean():.2f}", by_kind, _neurons(vectors.get(name))])
    report.add_table(["of", "harmonic mean", "mean by kind", "large rows: share, energy"], rows)
    for name, vector in vectors.items():
        # Of a dense vector it takes a decomposition of every matrix.
        needed = effective_ranks(vector, 0.9).values() if vector.is_low_rank else ()
        if needed:
            report.add_text(
                f"{name}: its factors have rank {max(vector.rank(each) for each in vector)} or less; 90 % of the "
                f"squared norm of a matrix are in {sum(needed) / len(needed):.1f} singular values on average "
                f"({min(needed)} to {max(needed)})."
            )
    for name, each in found.items():
        report.add_figure(f"ranks_{label_for(name)}", each.figure, f"ranks and norms of {name} by layer")


def _changed(matrices: Iterable[MatrixRank]) -> list[MatrixRank]:
    """The matrices that are not zero: a full fine-tune also holds those that were frozen."""
    return [matrix for matrix in matrices if matrix.spectral]


def _mean_rank(ranks: StableRanks, kind: Kind) -> str:
    found = [matrix.stable_rank for matrix in _changed(ranks.of_kind(kind))]
    return f"{sum(found) / len(found):.2f}" if found else "unchanged"


def _neurons(vector: TaskVector | None) -> str:
    if vector is None:
        return "–"
    try:
        found = [each for each in large_rows(vector) if each.share]
    except BadValueError:
        found = []
    if not found:
        return "no MLP changed"
    share, energy = (sum(values) / len(found) for values in zip(*((e.share, e.energy) for e in found), strict=True))
    return f"{share:.0%}, {energy:.0%}"


def write_epochs(report: MarkdownReport, steps: Sequence[TaskVector], gradient: TaskVector | None) -> None:
    """How the epochs of one fine-tune point."""
    report.begin_section(
        "Epoch by epoch",
        "Each epoch's share of the updates' norm, and how its update points. A schedule and AdamW change what updates "
        "are long; the gradients themselves need texts.",
    )
    try:
        alignment = gradient_alignment(steps, gradient)
    except BadValueError as error:  # an epoch that changed nothing, or led back to the base
        report.add_text(f"Not measured: {error}")
        return
    columns = {"share": [f"{share:.1%}" for share in alignment.update_shares]}
    columns["cosine with the first"] = [f"{cosine:.3f}" for cosine in alignment.with_first]
    if alignment.update_with_gradient is not None and alignment.vector_with_gradient is not None:
        columns["with the negative gradient"] = [f"{cosine:+.3f}" for cosine in alignment.update_with_gradient]
        columns["all epochs so far, with it"] = [f"{cosine:+.3f}" for cosine in alignment.vector_with_gradient]
    rows = [[str(number), *cells] for number, cells in enumerate(zip(*columns.values(), strict=True), 1)]
    report.add_table(["epoch", *columns], rows)
    report.add_figure("epochs", alignment.figure, "shares and cosines by epoch")


# With forward passes.


@dataclass(frozen=True)
class BaseAndTexts:
    """The live base, and rows of tokens of a text for each vector, by the vectors' names."""

    model: Any
    rows: Mapping[str, TokenRows]
    batch_size: int = 8


def write_correlations(
    report: MarkdownReport, vectors: NamedVectors, texts: BaseAndTexts, pooling: Pooling = "last"
) -> None:
    """α̂ between the tasks, and the λ that the theorems promise with it."""
    if len(vectors) < 2:
        report.begin_section(
            "Task correlation", "Not measured: correlation, and linearity, are of two fine-tunes or more."
        )
        return
    most = max(map(len, texts.rows.values()))
    report.begin_section(
        "Task correlation",
        f"α̂, eq. (11) of Li et al. (2025): the mean cosine of the fine-tunes' centred logits ({pooling} pooling), "
        f"{most} rows or fewer of each text. Logits mostly tell what all fine-tunes share with their base, so the same "
        "is measured *relative* to it: of log-probabilities less the base's.",
    )
    edited = {name: EditedModel(texts.model, vector) for name, vector in vectors.items()}
    forms = {
        form: correlation_matrix(edited, texts.rows, relative_to=base, pooling=pooling, batch_size=texts.batch_size)
        for form, base in (("literal", None), ("relative", texts.model))
    }
    report.add_figure("correlation", forms["literal"].figure, "task correlation")
    report.add_figure("correlation_relative", forms["relative"].figure, "task correlation, relative to the base")
    report.begin_section(
        "λ from theory",
        "What Theorems 1 and 2 promise. *Add*: λ of θ₀ + τ(first) + λ·τ(second). *Forget*: λ of a model that was "
        "trained on both, from which λ·τ(second) is taken away to forget the second and keep the first. The theorems "
        "hide constants: start here, then sweep.",
    )
    rows = []
    for keep, change in permutations(vectors, 2):
        for form, found in forms.items():
            recommended = recommend_scales(found[keep, change])
            assert recommended.add is not None and recommended.forget is not None
            spans = [_span(recommended.add), _span(recommended.forget.in_sweep)]
            rows.append([keep, change, form, f"{recommended.alpha:+.3f}", *spans])
    report.add_table(["first", "second", "form", "α̂", "add the second", "forget the second"], rows)
    for one, other in combinations(vectors, 2):
        recommended = recommend_scales(forms["relative"][one, other])
        why = [f"*{region.goal}*: {region.why}" for region in (recommended.add, recommended.forget) if region]
        report.add_text(f"{one}, {other}. {' '.join(why)}")
    if len(vectors) > 2:
        _write_transfers(report, list(vectors), forms["relative"])


def _write_transfers(report: MarkdownReport, names: list[str], found: CorrelationMatrix) -> None:
    """Theorem 3: each task in turn as one that no vector was trained on."""
    report.begin_section(
        "Transfer",
        "What Theorem 3 says if a task had no vector of its own: θ₀ + Σ λ·τ of the others, with γ = α̂ between them "
        f"and the task (relative), and with {PRACTICAL_MARGIN} for the hinge loss's margin of 1, as its authors have "
        "it in practice. The theorem is about tasks that are irrelevant to each other: where the others are not, it "
        "promises nothing, and the λ are a place to start. `recipes/transfer.py` tries them.",
    )
    rows = []
    for target in names:
        others = [name for name in names if name != target]
        between = [found[pair] for pair in combinations(others, 2)]
        largest = f"{max(between, key=abs):+.3f}".replace("-", "−")
        try:
            transfer = recommend_scales(
                gammas=[found[target, other] for other in others], between=between, margin=PRACTICAL_MARGIN
            ).transfer
        except BadValueError as error:
            rows.append([target, ", ".join(others), largest, str(error), "–"])
            continue
        assert transfer is not None
        scales = ", ".join(f"{scale:+.2f}".replace("-", "−") for scale in transfer.scales)
        rows.append([target, ", ".join(others), largest, transfer.verdict, scales or "–"])
        if len(others) == 2:
            draw = partial(transfer.figure, names=others)
            report.add_figure(f"transfer_{label_for(target)}", draw, f"Theorem 3's region for {target}")
    report.add_table(["task", "from the vectors of", "largest α̂ between them", "verdict", "λ"], rows)


def _span(region: ScaleRegion) -> str:
    if region.scale is None:
        return region.verdict
    return f"{region.verdict}: {region.low:.2f} ≤ λ ≤ {region.high:.2f}, first {region.scale:.2f}".replace("-", "−")


def write_linearity(report: MarkdownReport, vectors: NamedVectors, texts: BaseAndTexts) -> None:
    """Cross-task linearity of each two vectors, on the texts of both."""
    for one, other in combinations(vectors, 2):
        report.begin_section(f"Linearity: {one} and {other}")
        both = [*texts.rows[one], *texts.rows[other]]
        try:
            found = cross_task_linearity(texts.model, vectors[one], vectors[other], both, batch_size=texts.batch_size)
        except BadValueError as error:  # a model that overflows half-way
            report.add_text(f"Not measured: {error}")
            continue
        report.add_text(f"In the last layer, medians over {found.samples} rows; a coefficient of 1 is linear.")
        last = [line for line in found.table() if line["layer"] == found.layers - 1]
        columns = ("1 − cosine", "1 − baseline", "coefficient")
        report.add_table(
            ["kind", *columns], [[str(line["kind"]), *(f"{line[c]:.3g}" for c in columns)] for line in last]
        )
        file = f"linearity_{label_for(one)}-{label_for(other)}"
        report.add_figure(file, found.figure, "cross-task linearity by layer")


def write_gradients(report: MarkdownReport, vectors: NamedVectors, texts: BaseAndTexts) -> dict[str, TaskVector]:
    """The vectors beside the gradient on each text; gives the gradient steps."""
    report.begin_section(
        "Gradients",
        "The cosine of each vector with the negative gradient of the loss at the base, on its own text and on the "
        "others'. After one epoch of gradient descent on the same text it would be 1.",
    )
    steps = {
        name: TaskVector.from_gradient(texts.model, rows, 1.0, name=label_for(name), batch_size=texts.batch_size)
        for name, rows in texts.rows.items()
    }
    table = [[name, *(f"{vector.cosine(step):+.3f}" for step in steps.values())] for name, vector in vectors.items()]
    report.add_table(["vector", *(f"gradient on {name}" for name in steps)], table)
    return steps


def write_landscape(report: MarkdownReport, vectors: NamedVectors, texts: BaseAndTexts, size: int) -> None:
    """The loss on the plane through the base and the first two fine-tunes."""
    if len(vectors) < 2:
        report.begin_section("Landscape", "Not drawn: a plane goes through the base and two fine-tunes.")
        return
    one, other = list(vectors)[:2]
    report.begin_section(f"Landscape: {one} and {other}", "The loss on the plane through the base and both fine-tunes.")
    try:
        found = loss_landscape(
            texts.model,
            vectors[one],
            vectors[other],
            {name: texts.rows[name] for name in (one, other)},
            size=size,
            output=report.output / "points",
            batch_size=texts.batch_size,
        )
    except BadValueError as error:  # vectors that lie on a line span no plane; or the model overflows on it
        report.add_text(f"Not drawn: {error}")
    else:
        report.add_figure("landscape", found.figure, "loss on the plane through two fine-tunes")


def read_rows(file: Path, tokenizer: Any, length: int, most: int) -> TokenRows:
    """The start of a text, in rows of tokens of equal length."""
    text = file.read_text(encoding="utf-8", errors="replace")
    # No token is longer than 20 letters on average.
    ids = tokenizer(text[: length * most * 20], verbose=False)["input_ids"]
    rows = [ids[start : start + length] for start in range(0, len(ids), length)][:most]
    rows = [row for row in rows if len(row) == length] or rows
    if len(rows) < 2:
        raise BadValueError(
            f"{file.name} gives {len(rows)} rows of {length} tokens; two are needed. Use a longer text."
        )
    return rows
