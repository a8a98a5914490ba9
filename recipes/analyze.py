r"""Know before you merge or negate: one report on a base and some fine-tunes of it, with figures.

    python recipes/analyze.py microsoft/phi-1_5 me/phi-1_5-hp1 me/phi-1_5-hp2-lora        # no model is loaded
    python recipes/analyze.py base tuned adapter --data hp1.txt hp2.txt --landscape 9     # and with forward passes
    python recipes/analyze.py base tuned --epochs tuned/vectors/epoch-1 tuned/vectors/epoch-2

Or one question, answered from your own checkpoints (`--ask`):

    python recipes/analyze.py base a b --ask scale [--data a.txt b.txt]     # which λ without validation?
    python recipes/analyze.py base a b --ask epochs --data a.txt b.txt \
        --epochs a/vectors/epoch-1 a/vectors/epoch-2 --epochs b/vectors/epoch-1 b/vectors/epoch-2   # is epoch 1 enough?
    python recipes/analyze.py base a0 b0 a1 b1 --ask decay --decays 0 0 0.1 0.1 \
        --data a.txt b.txt a.txt b.txt                                      # how much weight decay?

Fine-tunes are full models, LoRA adapters or saved task vectors: folders or Hub ids, in any mixture. From the weights
alone: norms, cosines, stable ranks by kind of matrix, large rows. With a text for each fine-tune (best one that it was
not trained on) also: the tasks' correlation and the λ that theory recommends for adding and forgetting, cross-task
linearity, the vectors' alignment with the gradient, and the loss landscape. Everything is written to one folder:
`analysis.md`, and the figures as PNG and SVG.
"""

import argparse
import re
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from hf_taskvec.algebra.expressions import label_for
from hf_taskvec.algebra.task_vector import TaskVector
from hf_taskvec.analysis import report_sections as sections
from hf_taskvec.analysis.markdown_report import MarkdownReport
from hf_taskvec.application.compatibility import check_fits
from hf_taskvec.errors import BadValueError, MissingFileError
from hf_taskvec.experiments import questions
from hf_taskvec.experiments.recipe_running import run_recipe
from hf_taskvec.extraction.from_any import open_vector
from hf_taskvec.hub_names import split_revision
from hf_taskvec.models.checkpoint import open_checkpoint
from hf_taskvec.models.loading import load_for_evaluation, load_tokenizer


def main(arguments: Sequence[str] | None = None) -> Path:
    """Write the report that these flags, or those of the command line, ask for; where it is."""
    options = parse(arguments)
    names = check(options)
    # All that is given is opened before the work begins.
    base = open_checkpoint(options.base)
    given = zip(names, options.tuned, strict=True)
    vectors = {name: open_vector(where, options.base, name=label_for(name)) for name, where in given}
    epochs = [
        [open_vector(where, options.base, name=f"epoch_{n}") for n, where in enumerate(each, 1)]
        for each in options.epochs
    ]
    for vector in (*vectors.values(), *chain(*epochs)):
        check_fits(vector, base)
    assert base.folder is not None  # a checkpoint that was given by its folder or id
    rows = read_texts(options, names, base.config) if options.data else None

    report = MarkdownReport(options.output, f"{base.name}: what its fine-tunes tell")
    if options.ask:
        model = load_for_evaluation(base.folder, dtype=torch.float32, device=options.device)
        texts = sections.BaseAndTexts(model, rows or {}, options.batch_size)
        answer = ask(options, report, vectors, epochs, texts, base.config)
        print(f"\n{answer}\n")
        return report.save()
    steps = epochs[0] if epochs else []
    sections.write_cosines(report, vectors)
    sections.write_ranks(report, options.base, vectors, base.config)
    gradient = None
    if rows is not None:
        model = load_for_evaluation(base.folder, dtype=torch.float32, device=options.device)
        texts = sections.BaseAndTexts(model, rows, options.batch_size)
        sections.write_correlations(report, vectors, texts, options.pooling)
        sections.write_linearity(report, vectors, texts)
        gradient = sections.write_gradients(report, vectors, texts)[names[0]]
        if options.landscape:
            sections.write_landscape(report, vectors, texts, options.landscape)
    if steps:
        sections.write_epochs(report, steps, gradient)
    if rows is None:
        missing = "correlation, λ from theory, linearity, gradients" + (", the landscape" if options.landscape else "")
        report.begin_section(
            "With texts", f"Give a text for each fine-tune (`--data`) for what needs forward passes: {missing}."
        )
    return report.save()


def ask(
    options: argparse.Namespace,
    report: MarkdownReport,
    vectors: Mapping[str, TaskVector],
    epochs: Sequence[Sequence[TaskVector]],
    texts: sections.BaseAndTexts,
    config: Any,
) -> str:
    """The answer to one question."""
    if options.ask == "scale":
        return questions.ask_scale(report, vectors, texts, judged=bool(texts.rows))
    if options.ask == "epochs":
        return questions.ask_epochs(report, dict(zip(vectors, epochs, strict=True)), texts)
    # Fine-tunes with the same text are of the same task.
    first = {file.resolve(): name for name, file in reversed(list(zip(vectors, options.data, strict=True)))}
    tasks = [first[file.resolve()] for file in options.data]
    tuned = [
        questions.DecayedTask(decay, task, vector)
        for decay, task, vector in zip(options.decays, tasks, vectors.values(), strict=True)
    ]
    return questions.ask_decay(report, tuned, texts, config)


def check_question(options: argparse.Namespace) -> None:
    """Refuse what a question cannot be answered from."""
    count = len(options.tuned)
    if options.ask is None:
        if len(options.epochs) > 1:
            raise BadValueError("--epochs of several fine-tunes go with --ask epochs; the report has the first one's.")
        if options.decays is not None:
            raise BadValueError("--decays goes with --ask decay.")
        return
    if options.ask == "scale":
        if count < 2:
            raise BadValueError("--ask scale: a λ to merge by is for two fine-tunes or more.")
        return
    if options.data is None:
        raise BadValueError(f"--ask {options.ask} needs --data, a text for each fine-tune that it was not trained on.")
    if options.ask == "epochs":
        if len(options.epochs) != count or len({len(each) for each in options.epochs}) > 1:
            raise BadValueError(
                f"--ask epochs needs --epochs {count} times, once for each fine-tune, with as many epochs each."
            )
        if len(options.epochs[0]) < 2:
            raise BadValueError("--ask epochs: two epochs or more are compared.")
        return
    if options.decays is None or len(options.decays) != count:
        raise BadValueError(f"--ask decay needs --decays with {count} numbers, one for each fine-tune.")
    pairs = [(decay, file.resolve()) for decay, file in zip(options.decays, options.data, strict=True)]
    complete = len({decay for decay, _ in pairs}) * len({file for _, file in pairs})
    if len(set(pairs)) != count or count != complete or len(set(options.decays)) < 2:
        raise BadValueError(
            "--ask decay compares the same tasks at two weight decays or more: give each task (a text of --data) once "
            "at each of --decays."
        )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", help="the base model: a folder or a Hub id")
    parser.add_argument("tuned", nargs="+", help="fine-tunes, LoRA adapters or saved task vectors: folders or Hub ids")
    parser.add_argument("--names", nargs="+", help="short names for them, in the same order")
    parser.add_argument("--data", nargs="+", type=Path, help="a text file for each fine-tune, in the same order")
    parser.add_argument(
        "--epochs",
        nargs="+",
        action="append",
        default=[],
        help="what each epoch of the first fine-tune ended with; with --ask epochs once for each fine-tune",
    )
    parser.add_argument(
        "--ask",
        choices=["epochs", "decay", "scale"],
        help="one question instead of the report: is epoch 1 enough?, how much weight decay?, which λ without "
        "validation?",
    )
    parser.add_argument("--decays", nargs="+", type=float, help="the weight decay of each fine-tune, for --ask decay")
    parser.add_argument("--output", type=Path, default=Path("outputs/analysis"), help="folder for the report")
    parser.add_argument("--rows", type=int, default=32, help="rows of text from each file")
    parser.add_argument("--max-length", type=int, default=128, help="tokens in a row")
    parser.add_argument("--batch-size", type=int, default=8, help="rows in a forward pass")
    parser.add_argument(
        "--pooling", default="last", choices=["last", "mean", "sample"], help="which outputs α̂ compares"
    )
    parser.add_argument("--landscape", type=int, default=0, metavar="N", help="also the loss on N x N points (0: not)")
    parser.add_argument("--device", default="cpu", help="where forward passes run")
    return parser.parse_args(arguments)


def check(options: argparse.Namespace) -> list[str]:
    """The vectors' names, when nothing is wrong with what was given."""
    names = options.names or unique(options.tuned)
    if len(names) != len(options.tuned) or len(set(names)) != len(names):
        raise BadValueError(f"--names needs {len(options.tuned)} different names, one for each fine-tune.")
    if options.data is not None and len(options.data) != len(options.tuned):
        raise BadValueError(
            f"--data needs {len(options.tuned)} files, one for each fine-tune, not {len(options.data)}."
        )
    for name in names:
        if not re.fullmatch(r"[\w .-]+", name):
            raise BadValueError(f"--names {name}: use letters, digits and _ only, as for a file.")
    if len({label_for(name) for name in (*names, sections.BASE)}) <= len(names):
        raise BadValueError(
            f"--names {', '.join(names)}: files named after them and {sections.BASE!r} would be the same."
        )
    check_question(options)
    for option, least in {"rows": 2, "max_length": 2, "batch_size": 1}.items():
        if getattr(options, option) < least:
            raise BadValueError(f"--{option.replace('_', '-')} must be at least {least}.")
    if options.landscape and options.landscape < 2:
        raise BadValueError(f"--landscape {options.landscape}: a grid has two points along a side at least.")
    try:
        torch.empty(0, device=options.device)
    except (RuntimeError, AssertionError) as error:
        raise BadValueError(f"--device {options.device} cannot be used ({str(error).splitlines()[0]}).") from None
    return names


def unique(tuned: Sequence[str]) -> list[str]:
    """Names made of the last parts of what is given: without revisions where that tells them apart."""
    plain = [where if Path(where).exists() else split_revision(where, None)[0] for where in tuned]
    for given in (plain, tuned):
        labels = [label_for(where) for where in given]
        if len(set(labels)) == len(labels):
            return labels
    return [label if labels.count(label) == 1 else f"{label}_{n}" for n, label in enumerate(labels, 1)]


def read_texts(options: argparse.Namespace, names: Sequence[str], config: Any) -> dict[str, list[list[int]]]:
    """Rows of tokens of each text."""
    for file in options.data:
        if not file.is_file():
            raise MissingFileError(f"there is no file {file.name!r} at the given path.")
    tokenizer = load_tokenizer(options.base)
    context = config.get("max_position_embeddings") or config.get("n_positions") or options.max_length
    length = min(options.max_length, context)
    return {
        name: sections.read_rows(file, tokenizer, length, options.rows)
        for name, file in zip(names, options.data, strict=True)
    }


if __name__ == "__main__":
    run_recipe(lambda: print(f"Saved: {main()}"))
