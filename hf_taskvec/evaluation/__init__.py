"""What an edit made a model forget, what it kept, and how sure we are: in three steps.

1. `texts/`: books and the passages of them that a model is asked for, as a protocol says. `load_book` gives a `Book`.
2. `asking/`: the passages through the model at every λ, in batches that processes share. Finished ones are kept.
3. `scoring/` and `reporting/`: metrics, intervals, tests and the choice of λ; then the report as a value, as tables,
   plots and HTML. `rouge_l`, `Choice`, `UnlearningReport`.

`sweeping.py` does all three: `sweep(model, vector, scales, books)`, or `sweep(model, edits, None, books)` to compare
whole edits, such as those of `edit_grid`. `compare_seeds` and `edit_table` put the reports of several seeds together.
`metric_sweep.py` gives what a metric of your own says at each λ, of a model of any class: `score_scales`.
`utility.py` asks lm-evaluation-harness's tasks at each λ: `sweep(utility=["arc_easy"])`, `lm_eval_metric`.
`controls.py` asks whether it was this vector that forgot this book: `run_controls(model, vector, scale, books)`, or
`with_controls(report, model, vector, books)` after a sweep. Imports point from there down to the texts, never back.
`benchmarks/` asks what others ask: `load_benchmark("muse/books")`, then `run_benchmark(benchmark, model)`.
The harness takes a model and something that sets λ; how an edit works it does not know.

The public names are listed here and imported when first used: `import hf_taskvec.evaluation` costs no torch.

    from hf_taskvec.evaluation import load_book, protocols, sweep

    books = [load_book("alice.txt", role="forget"), load_book("oz.txt", role="retain")]
    report = sweep(model, vector, [0, -0.5, -1], books)
"""

from typing import TYPE_CHECKING

from hf_taskvec.lazy_names import lazy_names

if TYPE_CHECKING:
    from hf_taskvec.evaluation.benchmarks.benchmark_report import BenchmarkReport
    from hf_taskvec.evaluation.benchmarks.benchmark_run import run_benchmark
    from hf_taskvec.evaluation.benchmarks.named_benchmarks import Benchmark, load_benchmark
    from hf_taskvec.evaluation.benchmarks.prompt_forms import PromptForm
    from hf_taskvec.evaluation.controls import run_controls, with_controls
    from hf_taskvec.evaluation.edit_families import edit_grid, edit_line, edit_simplex
    from hf_taskvec.evaluation.metric_sweep import ScaleScores, score_scales
    from hf_taskvec.evaluation.reporting.control_table import ControlTable
    from hf_taskvec.evaluation.reporting.edit_table import EditTable, edit_table
    from hf_taskvec.evaluation.reporting.seed_summary import (
        MethodComparison,
        SeedSummary,
        compare_methods,
        compare_seeds,
    )
    from hf_taskvec.evaluation.reporting.tables import compare_reports
    from hf_taskvec.evaluation.reporting.theory_verdict import Judgement
    from hf_taskvec.evaluation.reporting.unlearning_report import UnlearningReport
    from hf_taskvec.evaluation.scoring.criteria import Criteria
    from hf_taskvec.evaluation.scoring.metrics import AnsweredPassage, Metric
    from hf_taskvec.evaluation.scoring.rouge import RougeScore, rouge_l
    from hf_taskvec.evaluation.scoring.scale_choice import Choice
    from hf_taskvec.evaluation.scoring.verdict import Verdict
    from hf_taskvec.evaluation.sweeping import sweep
    from hf_taskvec.evaluation.texts import protocols
    from hf_taskvec.evaluation.texts.books import Book, load_book
    from hf_taskvec.evaluation.texts.leaks import LeakReport, check_leaks
    from hf_taskvec.evaluation.texts.passages import Passage
    from hf_taskvec.evaluation.utility import lm_eval_metric

_HOMES = {
    "AnsweredPassage": "scoring.metrics",
    "Benchmark": "benchmarks.named_benchmarks",
    "BenchmarkReport": "benchmarks.benchmark_report",
    "Book": "texts.books",
    "Choice": "scoring.scale_choice",
    "ControlTable": "reporting.control_table",
    "Criteria": "scoring.criteria",
    "EditTable": "reporting.edit_table",
    "Judgement": "reporting.theory_verdict",
    "LeakReport": "texts.leaks",
    "MethodComparison": "reporting.seed_summary",
    "Metric": "scoring.metrics",
    "Passage": "texts.passages",
    "PromptForm": "benchmarks.prompt_forms",
    "RougeScore": "scoring.rouge",
    "ScaleScores": "metric_sweep",
    "SeedSummary": "reporting.seed_summary",
    "UnlearningReport": "reporting.unlearning_report",
    "Verdict": "scoring.verdict",
    "check_leaks": "texts.leaks",
    "compare_methods": "reporting.seed_summary",
    "compare_reports": "reporting.tables",
    "compare_seeds": "reporting.seed_summary",
    "edit_grid": "edit_families",
    "edit_line": "edit_families",
    "edit_simplex": "edit_families",
    "edit_table": "reporting.edit_table",
    "lm_eval_metric": "utility",
    "load_benchmark": "benchmarks.named_benchmarks",
    "load_book": "texts.books",
    "protocols": "texts",
    "rouge_l": "scoring.rouge",
    "run_benchmark": "benchmarks.benchmark_run",
    "run_controls": "controls",
    "score_scales": "metric_sweep",
    "sweep": "sweeping",
    "with_controls": "controls",
}

__all__ = [
    "AnsweredPassage",
    "Benchmark",
    "BenchmarkReport",
    "Book",
    "Choice",
    "ControlTable",
    "Criteria",
    "EditTable",
    "Judgement",
    "LeakReport",
    "MethodComparison",
    "Metric",
    "Passage",
    "PromptForm",
    "RougeScore",
    "ScaleScores",
    "SeedSummary",
    "UnlearningReport",
    "Verdict",
    "check_leaks",
    "compare_methods",
    "compare_reports",
    "compare_seeds",
    "edit_grid",
    "edit_line",
    "edit_simplex",
    "edit_table",
    "lm_eval_metric",
    "load_benchmark",
    "load_book",
    "protocols",
    "rouge_l",
    "run_benchmark",
    "run_controls",
    "score_scales",
    "sweep",
    "with_controls",
]

__getattr__ = lazy_names(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted(__all__)
