"""A card's front matter: the metadata that the Hub sorts models by, and the schema that it must meet to be pushed."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_taskvec import filenames
from hf_taskvec.algebra.expressions import label_for
from hf_taskvec.algebra.provenance import License, ModelRecord
from hf_taskvec.errors import BadValueError
from hf_taskvec.escaping import visible
from hf_taskvec.hub_client import LIBRARY_NAME, hub_api
from hf_taskvec.hub_names import CARD_ID
from hf_taskvec.models.card_metadata import datasets_in, front_matter, license_in
from hf_taskvec.models.folder_contents import ContentKind
from hf_taskvec.publishing.written_folder import Artifact

if TYPE_CHECKING:
    from huggingface_hub import EvalResult, ModelCardData

    from hf_taskvec.evaluation.reporting.unlearning_report import UnlearningReport

LIBRARY: dict[ContentKind, str] = {"model": "transformers", "adapter": "peft", "vector": LIBRARY_NAME}
# A vector, like an adapter, is of use on top of its base only; the Hub has no word of its own for it.
RELATION: dict[ContentKind, str] = {"model": "merge", "adapter": "adapter", "vector": "adapter"}
_METRICS = {"rouge_l": ("rouge", "Rouge-L (F1)"), "perplexity": ("perplexity", "Perplexity of the true continuation")}


def card_data(
    artifact: Artifact,
    *,
    model_name: str,
    base: ModelRecord | None,
    report: "UnlearningReport | None",
    scale: float | None,
    datasets: Sequence[str],
) -> "ModelCardData":
    """The front matter of an artifact's card. What is not known is left out."""
    from huggingface_hub import ModelCardData

    bases = base_models(artifact, base)
    license = base.license if base else None
    results = eval_results(report, scale) if report is not None and scale is not None else []
    measured = [_METRICS[m.name][0] for m in report.metrics if m.name in _METRICS] if report is not None else []
    options: dict[str, Any] = {"model_name": visible(model_name), "eval_results": results} if results else {}
    data = ModelCardData(
        base_model=_one_or_many(bases) or None,
        library_name=LIBRARY[artifact.kind],
        pipeline_tag="text-generation",
        license=_one_or_many(license.ids) if license else None,
        license_name=license.name if license else None,
        license_link=_link(license, base) if license else None,
        datasets=list(dict.fromkeys(datasets)) or None,
        metrics=measured or None,
        tags=_tags(artifact, report),
        **options,
    )
    if bases:
        data["base_model_relation"] = RELATION[artifact.kind]
    return data


def _one_or_many(values: Sequence[str]) -> Any:
    return values[0] if len(values) == 1 else list(values)


def base_models(artifact: Artifact, base: ModelRecord | None) -> list[str]:
    """Hub ids of what it is made from: for a merged model all models in it, else the base alone."""
    models = [*([base] if base else []), *(artifact.records if artifact.kind == "model" else ())]
    return list(dict.fromkeys(model.hub_id for model in models if model.hub_id))


def _tags(artifact: Artifact, report: "UnlearningReport | None") -> list[str]:
    tags = ["task-vector", "task-arithmetic", "hf_taskvec"]
    if artifact.kind == "model":
        tags.append("merge")
    if report is not None and any(book.role == "forget" for book in report.books):
        tags.append("unlearning")
    return tags


def _link(license: License, base: ModelRecord | None) -> str | None:
    """The link to the licence's text. A link within the base's own repository leads there from elsewhere, too."""
    if license.link is None or re.match(r"https?://", license.link):
        return license.link
    if base is None or base.hub_id is None or not re.fullmatch(r"[\w.-]+", license.link):
        return None
    return f"https://huggingface.co/{base.hub_id}/blob/{base.revision or 'main'}/{license.link}"


def with_card(model: ModelRecord, token: str | bool | None = None) -> ModelRecord:
    """The record with what the model's own card on the Hub states, where that was not recorded."""
    if model.license is not None or model.hub_id is None:
        return model
    from huggingface_hub.errors import HFValidationError, HTTPError, LocalEntryNotFoundError

    try:
        path = hub_api(token).hf_hub_download(model.hub_id, filenames.MODEL_CARD, revision=model.revision)
    except (HTTPError, HFValidationError, LocalEntryNotFoundError, ConnectionError):
        return model  # no card, no access, no network: then nothing is known, and the card says so
    data = front_matter(Path(path).read_text("utf-8", errors="replace"))
    return replace(model, license=license_in(data), datasets=datasets_in(data) or model.datasets)


def with_hub_id(base: ModelRecord | None, hub_id: str | None) -> ModelRecord | None:
    """The base under the Hub id that the user says it has."""
    if hub_id is None:
        return base
    name, _, revision = hub_id.partition("@")
    if not CARD_ID.fullmatch(name):
        raise BadValueError(f"base_model={hub_id!r} is not a Hub id such as 'microsoft/phi-1_5'.")
    return replace(base or ModelRecord(name), name=name, revision=revision or (base.revision if base else None))


def eval_results(report: "UnlearningReport", scale: float) -> list["EvalResult"]:
    """The forget and retain numbers at one λ. The role of a book is its `config`."""
    from huggingface_hub import EvalResult

    roles = {book.name: book.role for book in report.books}
    results = []
    for score in report.scores:
        if score.scale != scale or score.metric not in _METRICS:
            continue
        kind, title = _METRICS[score.metric]
        words = "seen in training" if score.split == "seen" else "held out"
        results.append(
            EvalResult(
                task_type="text-generation",
                task_name="Text generation",
                dataset_type=label_for(score.book),
                dataset_name=visible(f"{score.book} ({roles[score.book]}, {words})"),
                dataset_config=roles[score.book],
                dataset_split=score.split,
                dataset_args={"protocol": visible(report.protocol.id), "passages": score.n},
                metric_type=kind,
                metric_name=title,
                metric_value=round(score.value.value, 6),
                metric_args={
                    "interval": [round(score.value.low, 6), round(score.value.high, 6)],
                    "level": report.settings.level,
                },
            )
        )
    return results


# The schema


def check_metadata(data: Mapping[str, Any], kind: ContentKind) -> None:
    """Refuse front matter that the Hub would not understand, or that says something else than the folder is."""
    _require(data.get("library_name") == LIBRARY[kind], f"library_name must be {LIBRARY[kind]!r}")
    _require(data.get("pipeline_tag") == "text-generation", "pipeline_tag must be 'text-generation'")
    bases = _list(data.get("base_model"), "base_model")
    for each in bases:
        _require(CARD_ID.fullmatch(each), f"base_model {_short(each)} is not a Hub id (no path, no revision)")
    relation = data.get("base_model_relation")
    _require(not bases or relation == RELATION[kind], f"base_model_relation must be {RELATION[kind]!r}")
    for key in ("license", "tags", "metrics", "datasets"):
        _list(data.get(key), key)
    for each in _list(data.get("datasets"), "datasets"):
        _require(CARD_ID.fullmatch(each), f"datasets: {_short(each)} is not a Hub id")
    for each in _list(data.get("license"), "license"):
        _require(re.fullmatch(r"[a-z0-9][a-z0-9.+-]*", each), f"license {_short(each)} is not one of the Hub's ids")
    _require("task-vector" in _list(data.get("tags"), "tags"), "tags must have 'task-vector'")
    for model in data.get("model-index") or ():
        _require(isinstance(model, dict) and isinstance(model.get("name"), str), "model-index needs a name")
        for result in model.get("results") or ():
            _check_result(result)


def _check_result(result: Any) -> None:
    try:
        named = [result["task"]["type"], result["dataset"]["type"], result["dataset"]["name"]]
        values = [(metric["type"], metric["value"]) for metric in result["metrics"]]
    except (KeyError, TypeError):
        raise BadValueError("the card's model-index lacks a task, a data set or a metric.") from None
    _require(all(isinstance(each, str) and each for each in named), "model-index: types and names are texts")
    for kind, value in values:
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        _require(isinstance(kind, str) and is_number, f"model-index: {_short(kind)} has no finite number")


def _list(value: Any, key: str) -> list[str]:
    values = value if isinstance(value, list) else [] if value is None else [value]
    _require(all(isinstance(each, str) and each for each in values), f"{key} must be a text or a list of texts")
    return values


def _short(value: object) -> str:
    return repr(str(value).rsplit("/", 1)[-1][:60])


def _require(holds: object, message: str) -> None:
    if not holds:
        raise BadValueError(
            f"the card's metadata is wrong: {message}. Correct README.md, or remove it to get a new one."
        )
