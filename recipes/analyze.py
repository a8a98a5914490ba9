"""Know before you merge or negate: one report on a base and some fine-tunes of it, with figures.

    python recipes/analyze.py microsoft/phi-1_5 me/phi-1_5-hp1 me/phi-1_5-hp2-lora        # no model is loaded
    python recipes/analyze.py base tuned adapter --data hp1.txt hp2.txt --landscape 9     # and with forward passes
    python recipes/analyze.py base tuned --epochs tuned/vectors/epoch-1 tuned/vectors/epoch-2

Fine-tunes are full models, LoRA adapters or saved task vectors: folders or Hub ids, in any mixture. From the weights
alone: norms, cosines, stable ranks by kind of matrix, large rows. With a text for each fine-tune (best one that it was
not trained on) also: the tasks' correlation and the λ that theory recommends for adding and forgetting, cross-task
linearity, the vectors' alignment with the gradient, and the loss landscape. Everything is written to one folder:
`analysis.md`, and the figures as PNG and SVG.
"""

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import combinations, permutations
from pathlib import Path
from typing import Any

import torch

from hf_taskvec import TaskVector, TaskVectorError
from hf_taskvec.analysis import (
    PRACTICAL_MARGIN,
    CorrelationMatrix,
    Edited,
    Ranks,
    correlation_matrix,
    cosine_matrix,
    cross_task_linearity,
    effective_ranks,
    gradient_alignment,
    large_rows,
    loss_landscape,
    recommend_scales,
    stable_ranks,
)
from hf_taskvec.analysis.kinds import Kind, place_of
from hf_taskvec.analysis.ranks import MatrixRank
from hf_taskvec.checkpoint import open_checkpoint
from hf_taskvec.errors import BadValueError, MissingFileError, OutputError
from hf_taskvec.experiment.materials import read_tokenizer
from hf_taskvec.figures import render
from hf_taskvec.fit import check_fits
from hf_taskvec.provenance import label_for

BASE = "the base"


class Report:
    """Sections of Markdown, and the figures that they show."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lines: list[str] = []
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(f"{folder.name} cannot be made a folder for the report ({error.strerror}).") from None

    def section(self, title: str, *text: str) -> None:
        if self.lines:
            self.save()  # what is there stays, whatever comes
        print(f"· {title}", flush=True)
        self.lines += [f"## {title}", "", *(line for part in text for line in (part, ""))]

    def text(self, *text: str) -> None:
        self.lines += [line for part in text for line in (part, "")]

    def table(self, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        cells = [head, ["---"] * len(head), *rows]
        self.lines += ["| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in cells] + [""]

    def figure(self, name: str, draw: Callable[[], Any], caption: str) -> None:
        for file, content in render({name: draw}).items():
            (self.folder / file).write_bytes(content)
        self.lines += [f"![{caption}]({name}.png)", ""]

    def save(self) -> Path:
        path = self.folder / "analysis.md"
        path.write_text("\n".join(self.lines).rstrip() + "\n", encoding="utf-8")
        return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", help="the base model: a folder or a Hub id")
    parser.add_argument("tuned", nargs="+", help="fine-tunes, LoRA adapters or saved task vectors: folders or Hub ids")
    parser.add_argument("--names", nargs="+", help="short names for them, in the same order")
    parser.add_argument("--data", nargs="+", type=Path, help="a text file for each fine-tune, in the same order")
    parser.add_argument("--epochs", nargs="+", default=[], help="what each epoch of the first fine-tune ended with")
    parser.add_argument("--output", type=Path, default=Path("outputs/analysis"), help="folder for the report")
    parser.add_argument("--rows", type=int, default=32, help="rows of text from each file")
    parser.add_argument("--max-length", type=int, default=128, help="tokens in a row")
    parser.add_argument("--batch-size", type=int, default=8, help="rows in a forward pass")
    parser.add_argument(
        "--pooling", default="last", choices=["last", "mean", "sample"], help="which outputs α̂ compares"
    )
    parser.add_argument("--landscape", type=int, default=0, metavar="N", help="also the loss on N x N points (0: not)")
    parser.add_argument("--device", default="cpu", help="where forward passes run")
    try:
        path = analyze(parser.parse_args())
    except TaskVectorError as error:
        sys.exit(f"error: {error}")
    print(f"Saved: {path}")


def analyze(options: argparse.Namespace) -> Path:
    names = options.names or unique([label_for(str(where)) for where in options.tuned])
    if len(names) != len(options.tuned) or len(set(names)) != len(names):
        raise BadValueError(f"--names needs {len(options.tuned)} different names, one for each fine-tune.")
    if options.data is not None and len(options.data) != len(options.tuned):
        raise BadValueError(
            f"--data needs {len(options.tuned)} files, one for each fine-tune, not {len(options.data)}."
        )
    for name in names:
        if not re.fullmatch(r"[\w .-]+", name):
            raise BadValueError(f"--names {name}: use letters, digits and _ only, as for a file.")
    if len({label_for(name) for name in (*names, BASE)}) <= len(names):
        raise BadValueError(f"--names {', '.join(names)}: files named after them and {BASE!r} would be the same.")
    for option, least in {"rows": 2, "max_length": 2, "batch_size": 1}.items():
        if getattr(options, option) < least:
            raise BadValueError(f"--{option.replace('_', '-')} must be at least {least}.")
    if options.landscape and options.landscape < 2:
        raise BadValueError(f"--landscape {options.landscape}: a grid has two points along a side at least.")
    try:
        torch.empty(0, device=options.device)
    except (RuntimeError, AssertionError) as error:
        raise BadValueError(f"--device {options.device} cannot be used ({str(error).splitlines()[0]}).") from None
    # All that is given is opened before the work begins.
    base = open_checkpoint(options.base)
    config = base.config
    vectors = {name: open_vector(where, options.base, name) for name, where in zip(names, options.tuned, strict=True)}
    steps = [open_vector(where, options.base, f"epoch_{n}") for n, where in enumerate(options.epochs, 1)]
    for vector in (*vectors.values(), *steps):
        check_fits(vector, base)
    data = None if options.data is None else read_data(options, names, config)
    report = Report(options.output)
    report.lines += [f"# {Path(options.base).name}: what its fine-tunes tell", ""]
    geometry(report, vectors)
    ranks(report, options.base, vectors, config)
    gradient = None if data is None else forward_passes(report, options, vectors, data)
    if steps:
        epochs(report, steps, gradient)
    if data is None:
        report.section("With texts", "Give a text for each fine-tune (`--data`) for what needs forward passes.")
    return report.save()


def unique(names: list[str]) -> list[str]:
    return [name if names.count(name) == 1 else f"{name}_{number}" for number, name in enumerate(names, 1)]


def open_vector(where: str, base: str, name: str) -> TaskVector:
    """A fine-tune, an adapter or a saved vector as a vector."""
    if has_file(where, "taskvec.json"):
        return TaskVector.load(where).named(name)
    if has_file(where, "adapter_config.json"):
        return TaskVector.from_adapter(where, base, name=name)
    return TaskVector.from_finetuned(base, where, name=name)


def has_file(where: str, file: str) -> bool:
    if Path(where).is_dir():
        return (Path(where) / file).exists()
    from huggingface_hub import file_exists, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError, OfflineModeIsEnabled

    try:
        return file_exists(where, file)
    except HFValidationError:
        raise MissingFileError(f"{Path(where).name!r} is neither a folder here nor a Hub id.") from None
    except (OfflineModeIsEnabled, HfHubHTTPError, HTTPError, ConnectionError):
        return isinstance(try_to_load_from_cache(where, file), str)


# From the weights alone.


def geometry(report: Report, vectors: dict[str, TaskVector]) -> None:
    report.section("The vectors")
    norms = {name: vector.norm() for name, vector in vectors.items()} if len(vectors) == 1 else {}
    if len(vectors) > 1:
        cosines = cosine_matrix(vectors)
        norms = dict(zip(cosines.names, cosines.norms, strict=True))
    rows = []
    for name, vector in vectors.items():
        kind = "low-rank" if vector.is_low_rank else "dense"
        rows.append([name, vector.provenance.origins[0].how, kind, str(len(vector)), f"{norms[name]:.4g}"])
    report.table(["vector", "what it is", "kind", "parameters", "norm"], rows)
    if len(vectors) == 1:
        report.text("Cosines need two vectors or more.")
        return
    report.section(
        "Cosines", "Near 0: the edits hardly touch each other. A cheap proxy of the tasks' correlation, below."
    )
    report.figure("cosines", cosines.figure, "cosines between the vectors")
    report.figure("cosines_by_layer", cosines.layer_figure, "cosines and norms by layer")


def ranks(report: Report, base: str, vectors: dict[str, TaskVector], config: Any) -> None:
    report.section(
        "Stable ranks",
        "‖W‖_F / ‖W‖₂: 1 for a matrix of rank 1. The harmonic mean is over O, QKV and both matrices of the MLP in all layers. Large "
        "rows are the MLP's neurons whose change is at least a tenth of the largest one's.",
    )
    found: dict[str, Ranks] = {BASE: stable_ranks(base)}
    for name, vector in vectors.items():
        measured = stable_ranks(vector, config=config) if any(map(place_of, vector)) else None
        if measured is not None and changed(measured.matrices):
            found[name] = measured
        else:
            report.text(f"{name}: not applicable, because it changes no matrix of attention or of an MLP.")
    rows = []
    for name, each in found.items():
        by_kind = ", ".join(f"{kind} {mean_rank(each, kind)}" for kind in each.kinds)
        rows.append([name, f"{each.harmonic_mean():.2f}", by_kind, neurons(vectors.get(name))])
    report.table(["of", "harmonic mean", "mean by kind", "large rows: share, energy"], rows)
    for name, vector in vectors.items():
        # Of a dense vector it takes a decomposition of every matrix.
        needed = effective_ranks(vector, 0.9).values() if vector.is_low_rank else ()
        if needed:
            report.text(
                f"{name}: its factors have rank {max(vector.rank(each) for each in vector)} or less; 90 % of the squared norm of a "
                f"matrix are in {sum(needed) / len(needed):.1f} singular values on average ({min(needed)} to {max(needed)})."
            )
    for name, each in found.items():
        report.figure(f"ranks_{label_for(name)}", each.figure, f"ranks and norms of {name} by layer")


def changed(matrices: Iterable[MatrixRank]) -> list[MatrixRank]:
    """The matrices that are not zero: a full fine-tune also holds those that were frozen."""
    return [matrix for matrix in matrices if matrix.spectral]


def mean_rank(ranks: Ranks, kind: Kind) -> str:
    found = [matrix.stable_rank for matrix in changed(ranks.of_kind(kind))]
    return f"{sum(found) / len(found):.2f}" if found else "unchanged"


def neurons(vector: TaskVector | None) -> str:
    if vector is None:
        return "–"
    try:
        found = large_rows(vector)
    except BadValueError:
        return "no MLP changed"
    found = [each for each in found if each.share]
    if not found:
        return "no MLP changed"
    mean = [sum(values) / len(found) for values in zip(*((each.share, each.energy) for each in found), strict=True)]
    return f"{mean[0]:.0%}, {mean[1]:.0%}"


def epochs(report: Report, steps: list[TaskVector], gradient: TaskVector | None) -> None:
    report.section(
        "Epoch by epoch",
        "Each epoch's share of the updates' norm, and how its update points (Zhou et al. 2025: the first epoch has the largest share, "
        "and the next ones keep a cosine above 0.8 with it).",
    )
    try:
        alignment = gradient_alignment(steps, gradient)
    except BadValueError as error:  # an epoch that changed nothing, or led back to the base
        report.text(f"Not measured: {error}")
        return
    columns = {"share": [f"{share:.1%}" for share in alignment.shares]}
    columns["cosine with the first"] = [f"{cosine:.3f}" for cosine in alignment.with_first]
    if alignment.update_with_gradient is not None and alignment.vector_with_gradient is not None:
        columns["with the negative gradient"] = [f"{cosine:+.3f}" for cosine in alignment.update_with_gradient]
        columns["all epochs so far, with it"] = [f"{cosine:+.3f}" for cosine in alignment.vector_with_gradient]
    rows = [[str(number), *cells] for number, cells in enumerate(zip(*columns.values(), strict=True), 1)]
    report.table(["epoch", *columns], rows)
    report.figure("epochs", alignment.figure, "shares and cosines by epoch")


# With forward passes.


def read_data(options: argparse.Namespace, names: Sequence[str], config: Any) -> dict[str, list[list[int]]]:
    """Rows of tokens of each text."""
    for file in options.data:
        if not file.is_file():
            raise MissingFileError(f"there is no file {file.name!r} at the given path.")
    tokenizer = read_tokenizer(options.base)
    context = config.get("max_position_embeddings") or config.get("n_positions") or options.max_length
    length = min(options.max_length, context)
    return {
        name: read_rows(file, tokenizer, length, options.rows) for name, file in zip(names, options.data, strict=True)
    }


def forward_passes(
    report: Report, options: argparse.Namespace, vectors: dict[str, TaskVector], data: dict[str, list[list[int]]]
) -> TaskVector:
    """Everything that runs the model; gives the gradient step on the first text."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(options.base, dtype=torch.float32).to(options.device).eval()
    shared = {"batch_size": options.batch_size}
    if len(vectors) > 1:
        correlations(report, options, model, vectors, data)
        for one, other in combinations(vectors, 2):
            report.section(f"Linearity: {one} and {other}")
            both = data[one] + data[other]
            try:
                linearity = cross_task_linearity(model, vectors[one], vectors[other], both, **shared)
            except BadValueError as error:  # a model that overflows half-way
                report.text(f"Not measured: {error}")
                continue
            report.text(f"In the last layer, medians over {linearity.samples} rows; a coefficient of 1 is linear.")
            last = [line for line in linearity.table() if line["layer"] == linearity.layers - 1]
            columns = ("1 − cosine", "1 − baseline", "coefficient")
            report.table(["kind", *columns], [[line["kind"], *(f"{line[c]:.3g}" for c in columns)] for line in last])
            file = f"linearity_{label_for(one)}-{label_for(other)}"
            report.figure(file, linearity.figure, "cross-task linearity by layer")
    gradient = gradients(report, options, model, vectors, data)
    if options.landscape and len(vectors) > 1:
        one, other = list(vectors)[:2]
        report.section(f"Landscape: {one} and {other}", "The loss on the plane through the base and both fine-tunes.")
        kept = options.output / "points"
        try:
            landscape = loss_landscape(
                model,
                vectors[one],
                vectors[other],
                {n: data[n] for n in (one, other)},
                size=options.landscape,
                output=kept,
                **shared,
            )
        except BadValueError as error:  # vectors that lie on a line span no plane; or the model overflows on it
            report.text(f"Not drawn: {error}")
        else:
            report.figure("landscape", landscape.figure, "loss on the plane through two fine-tunes")
    return gradient


def read_rows(file: Path, tokenizer: Any, length: int, most: int) -> list[list[int]]:
    """The start of a text, in rows of tokens."""
    text = file.read_text(encoding="utf-8", errors="replace")
    ids = tokenizer(text[: length * most * 20], verbose=False)[
        "input_ids"
    ]  # no token is longer than 20 letters on average
    rows = [ids[start : start + length] for start in range(0, len(ids), length)][:most]
    rows = [row for row in rows if len(row) == length] or rows
    if len(rows) < 2:
        raise BadValueError(
            f"{file.name} gives {len(rows)} rows of {length} tokens; two are needed. Use a longer text."
        )
    return rows


def correlations(
    report: Report,
    options: argparse.Namespace,
    model: Any,
    vectors: dict[str, TaskVector],
    data: dict[str, list[list[int]]],
) -> None:
    report.section(
        "Task correlation",
        f"α̂, eq. (11) of Li et al. (2025): the mean cosine of the fine-tunes' centred logits ({options.pooling} pooling), "
        f"{options.rows} rows or fewer of each text.",
    )
    edited = {name: Edited(model, vector) for name, vector in vectors.items()}
    found = correlation_matrix(edited, data, pooling=options.pooling, batch_size=options.batch_size)
    report.figure("correlation", found.figure, "task correlation")
    report.section(
        "λ from theory",
        "What Theorems 1 and 2 promise. *Add*: λ of θ₀ + τ(first) + λ·τ(second). *Forget*: λ of a model that was trained on both, from "
        "which λ·τ(second) is taken away to forget the second and keep the first. The theorems hide constants: start here, then sweep.",
    )
    rows = []
    for keep, change in permutations(vectors, 2):
        recommended = recommend_scales(found[keep, change])
        assert recommended.add is not None and recommended.forget is not None
        rows.append(
            [keep, change, f"{recommended.alpha:+.3f}", span(recommended.add), span(recommended.forget.in_sweep)]
        )
    report.table(["first", "second", "α̂", "add the second", "forget the second"], rows)
    for one, other in combinations(vectors, 2):
        recommended = recommend_scales(found[one, other])
        why = [f"*{region.goal}*: {region.why}" for region in (recommended.add, recommended.forget) if region]
        report.text(f"{one}, {other}. {' '.join(why)}")
    if len(vectors) > 2:
        transfers(report, list(vectors), found)


def transfers(report: Report, names: list[str], found: CorrelationMatrix) -> None:
    """Theorem 3: each task in turn as one that no vector was trained on."""
    report.section(
        "Transfer",
        "What Theorem 3 promises if a task had no vector of its own: θ₀ + Σ λ·τ of the others, with γ = α̂ between them and the task.",
    )
    rows = []
    for target in names:
        others = [name for name in names if name != target]
        try:
            transfer = recommend_scales(
                gammas=[found[target, other] for other in others], margin=PRACTICAL_MARGIN
            ).transfer
        except BadValueError as error:
            rows.append([target, ", ".join(others), str(error), "–"])
            continue
        assert transfer is not None
        scales = ", ".join(f"{scale:+.2f}".replace("-", "−") for scale in transfer.scales)
        rows.append([target, ", ".join(others), transfer.verdict, scales or "–"])
        if len(others) == 2:
            report.figure(f"transfer_{label_for(target)}", transfer.figure, f"Theorem 3's region for {target}")
    report.table(["task", "from the vectors of", "verdict", "λ"], rows)


def span(region: Any) -> str:
    if region.scale is None:
        return region.verdict
    return f"{region.verdict}: {region.low:.2f} ≤ λ ≤ {region.high:.2f}, first {region.scale:.2f}".replace("-", "−")


def gradients(
    report: Report,
    options: argparse.Namespace,
    model: Any,
    vectors: dict[str, TaskVector],
    data: dict[str, list[list[int]]],
) -> TaskVector:
    report.section(
        "Gradients",
        "The cosine of each vector with the negative gradient of the loss at the base, on its own text and on the others'. After one "
        "epoch of gradient descent on the same text it would be 1.",
    )
    steps = {
        name: TaskVector.from_gradient(model, rows, 1.0, name=name, batch_size=options.batch_size)
        for name, rows in data.items()
    }
    table = [[name, *(f"{vector.cosine(step):+.3f}" for step in steps.values())] for name, vector in vectors.items()]
    report.table(["vector", *(f"gradient on {name}" for name in steps)], table)
    return next(iter(steps.values()))


if __name__ == "__main__":
    main()
