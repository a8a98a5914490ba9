"""Our Rouge-L as an `evaluate.Metric`, for code that expects one. It needs neither the Hub nor a script."""

import datasets
import evaluate
import numpy as np

from hf_taskvec.evaluation.scoring.rouge import rouge_l

_DESCRIPTION = (
    "Rouge-L (longest common subsequence of words) between predictions and references: "
    "the numbers of `rouge_score`, computed with a bit-parallel algorithm."
)
_CITATION = "Lin (2004), ROUGE: A Package for Automatic Evaluation of Summaries."
_INPUTS = """
Args:
    predictions: list of generated texts.
    references: list of true texts.
    use_stemmer: compare Porter stems (default False).
    use_aggregator: return means over the texts (default) instead of one value for each.
Returns:
    rougeL (F1), rougeL_precision, rougeL_recall.
"""


class RougeL(evaluate.Metric):
    """Rouge-L with the interface of `evaluate`: `RougeL().compute(predictions=..., references=...)`."""

    def _info(self) -> evaluate.MetricInfo:
        text = datasets.Value("string")
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_INPUTS,
            features=datasets.Features({"predictions": text, "references": text}),
        )

    def _compute(
        self,
        predictions: list[str],
        references: list[str],
        use_stemmer: bool = False,
        use_aggregator: bool = True,
    ) -> dict[str, float | list[float]]:
        scores = [rouge_l(p, r, use_stemmer) for p, r in zip(predictions, references, strict=True)]
        columns = {
            "rougeL": [score.fmeasure for score in scores],
            "rougeL_precision": [score.precision for score in scores],
            "rougeL_recall": [score.recall for score in scores],
        }
        if not use_aggregator:
            return dict(columns)
        return {name: float(np.mean(values)) for name, values in columns.items()}
