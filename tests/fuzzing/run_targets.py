"""What runs leave for later runs: reports, stores, training records and states, notes of interrupted work."""

from __future__ import annotations

import json
import types
import typing
from dataclasses import asdict, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from fuzzing.formats import Json, JsonLines, SafetensorsHeader
from fuzzing.runner import AnyOf, MeaninglessError, Target
from fuzzing.vector_targets import _loaded, _number, _reread, _typed, _whole
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors

from hf_taskvec.analysis.landscapes import _FinishedPoints
from hf_taskvec.application.finished_files import FinishedFiles
from hf_taskvec.auditing import AuditReport
from hf_taskvec.evaluation import BenchmarkReport, Criteria, UnlearningReport
from hf_taskvec.evaluation.asking.finished_passages import FinishedPassages, _digest
from hf_taskvec.evaluation.asking.generation import Continuation
from hf_taskvec.evaluation.benchmarks.asking_items import ItemResult
from hf_taskvec.evaluation.benchmarks.benchmark_report import PartResult
from hf_taskvec.experiments.multitask import rounds
from hf_taskvec.experiments.multitask.round_trace import RoundTrace, Trace
from hf_taskvec.filenames import (
    AUDIT_JSON,
    BENCHMARK_JSON,
    FORGOTTEN_RECORD,
    REPAIR_RECORD,
    REPORT_JSON,
    TRAINING_RECORD,
    TRAINING_STATE,
)
from hf_taskvec.files.results_folder import open_results_folder
from hf_taskvec.forgetting.forgotten import EditCost, ForgetRecord, read_forget_record, write_forgotten
from hf_taskvec.models.trained_books import recorded_books
from hf_taskvec.training.repair_record import is_repair_of, read_figures, write_repair
from hf_taskvec.training.run_record import Finetuned, is_record_of, write_record
from hf_taskvec.training.saved_state import find_state, load_state, save_state

# Reports.

EARLIER_REPORT = Path(__file__).parents[1] / "evaluation" / "report_version_3.json"

_NAMES = {"book": "A", "name": "A", "first": "A", "second": "B", "metric": "rouge_l", "scale": -0.5, "reference": "A"}
_NAMES |= {"metrics": "rouge_l", "high": 1.25}  # the bounds of criteria enclose 1


def example(kind: Any, name: str = "") -> Any:
    """Some value of a type, as a report could have it: every field is there, and none is empty."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return example(inner[0], name)
    if origin is typing.Literal:
        return inner[0]
    if origin is tuple:
        return (example(inner[0], name),) * (len(inner) if inner[-1] is not Ellipsis else 1)
    if origin is dict:
        return {"rouge_l": example(inner[1], name)}
    if is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return kind(**{field.name: example(hints[field.name], field.name) for field in fields(kind)})  # type: ignore[operator]
    return (
        _NAMES.get(name)
        if name in _NAMES and isinstance(_NAMES[name], kind)
        else {str: "text", int: 3, float: 0.25, bool: True}[kind]
    )


@cache
def _report() -> UnlearningReport:
    report = example(UnlearningReport)
    metrics = (replace(report.metrics[0], name="rouge_l"),)
    numbers = (0.0, 1.0)  # of the untouched model and the one edit
    return replace(report, scales=numbers, metrics=metrics, controls=replace(report.controls, metrics=metrics))


def make_report(folder: Path) -> None:
    _report().save(folder, plots=False)


def read_report(folder: Path) -> Any:
    report = UnlearningReport.load(folder)
    assert report.to_markdown() and report._repr_html_()  # whatever is accepted can be shown
    return json.loads(report.to_json())


def make_earlier_report(folder: Path) -> None:
    """A report that the version before wrote, with two of its passages."""
    content = json.loads(EARLIER_REPORT.read_text("utf-8"))
    (folder / REPORT_JSON).write_text(json.dumps({**content, "passages": content["passages"][:2]}))


def read_earlier_report(folder: Path) -> bool:
    """Whether it can be read and shown. What a changed one means, the fields of today tell: see `expected_report`."""
    report = UnlearningReport.load(folder)
    return UnlearningReport.from_dict(report.to_dict()) == report and bool(report.to_markdown() + report._repr_html_())


def expected_report(document: Any, folder: Path) -> Any:
    """The very document, if each of its values is of the declared type."""
    document = _reread(_loaded(document) if isinstance(document, bytes) else document)
    known = {"schema", "version", *(field.name for field in fields(UnlearningReport))}
    document = {"theory": None, "edits": [], **_typed(document, dict)}  # reports from before have neither
    found = {key: value for key, value in document.items() if key in known}
    for key, kind in typing.get_type_hints(UnlearningReport).items():
        found[key] = conforming(kind, document.get(key), key)
    found["protocol"]["hash"] = _protocol_hash(found["protocol"])
    return found


# Audits.


def make_audit(folder: Path) -> None:
    example(AuditReport).save(folder, plots=False)


def read_audit(folder: Path) -> Any:
    report = AuditReport.load(folder)
    assert report.sentence and report.to_markdown()  # whatever is accepted can be shown
    return json.loads(json.dumps(report.to_dict()))


def expected_audit(document: Any, folder: Path) -> Any:
    """The very document, if each of its values is of the declared type, and tables have what they show."""
    document = _typed(_reread(_loaded(document) if isinstance(document, bytes) else document), dict)
    found = {key: value for key, value in document.items() if key in ("schema", "version")}
    for key, kind in typing.get_type_hints(AuditReport).items():
        found[key] = conforming(kind, document.get(key), key)
    found["protocol"]["hash"] = _protocol_hash(found["protocol"])
    for points in ([found["plain"]], *(each["points"] for each in found["findings"])):
        for point in points:
            if {each["metric"] for each in points[-1]["verdict"]["metrics"]} - {r["metric"] for r in point["results"]}:
                raise MeaninglessError("a verdict without a result")
    return found


def _protocol_hash(fields: Any) -> str:
    from hf_taskvec.evaluation.texts.protocols import Protocol

    try:
        return Protocol.from_dict(fields).hash
    except ValueError as error:
        raise MeaninglessError(str(error)) from None


def _check_criteria(found: dict[str, Any]) -> None:
    try:
        Criteria(**{**found, "metrics": tuple(found["metrics"])})
    except ValueError as error:
        raise MeaninglessError(str(error)) from None


def conforming(kind: Any, value: Any, where: str) -> Any:
    """The value without what no type declares; an error if it is not of its type."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        if value is None and types.NoneType in inner:
            return None
        return conforming(next(each for each in inner if each is not types.NoneType), value, where)
    if origin is typing.Literal:
        if value not in inner or type(value) is not type(inner[0]):
            raise MeaninglessError(f"{where} is {str(value)[:40]!r}")
        return value
    if origin is tuple:
        return [conforming(inner[0], each, where) for each in _typed(value, list)]
    if origin is dict:
        return {key: conforming(inner[1], each, where) for key, each in _typed(value, dict).items()}
    if is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        given = _typed(value, dict)
        later = {"cut": "alone", "instruction": "", "cue": "", "word_tokens": "white_space", "answer_from": "prompt"}
        given = {**later, "theory": None, **given}
        if missing := [field.name for field in fields(kind) if field.name not in given]:
            raise MeaninglessError(f"{where} has no {missing[0]}")
        found = {field.name: conforming(hints[field.name], given[field.name], field.name) for field in fields(kind)}
        if kind is Criteria:
            _check_criteria(found)
        return found
    return _number(value) if kind is float else _typed(value, kind)


# Reports of benchmarks.

_MUSE_PARTS = {
    "verbmem_forget": ("rouge_l",),
    "knowmem_forget": ("rouge_l", "rouge_l_recall"),
    "knowmem_retain": ("rouge_l", "rouge_l_recall"),
    "privleak_forget": ("min_k",),
    "privleak_holdout": ("min_k",),
}
_MUSE_METRICS = ("forget_knowmem", "forget_verbmem", "privleak", "retain_knowmem")
_MUSE_METRICS += ("forget_knowmem_recall", "retain_knowmem_recall")


def make_benchmark(folder: Path) -> None:
    report = example(BenchmarkReport)
    numbers = dict.fromkeys(_MUSE_METRICS, 0.5)
    parts = tuple(
        PartResult(name, "me/data (a, split b)", "f" * 64, "p@1", (ItemResult("é", dict.fromkeys(values, -0.25)),) * 2)
        for name, values in _MUSE_PARTS.items()
    )
    retrained = replace(report.retrained, metrics=numbers)
    replace(report, benchmark="muse/books", metrics=numbers, retrained=retrained, parts=parts).save(folder)


def read_benchmark(folder: Path) -> Any:
    report = BenchmarkReport.load(folder)
    assert str(report) and report.values  # whatever is accepted can be shown and compared with
    return json.loads(json.dumps(report.to_dict()))


def expected_benchmark(document: Any, folder: Path) -> Any:
    """The very document, if its values are of their types and it has every metric, part and number of the benchmark."""
    document = _typed(_reread(_loaded(document) if isinstance(document, bytes) else document), dict)
    found = {key: value for key, value in document.items() if key in ("schema", "version")}
    for key, kind in typing.get_type_hints(BenchmarkReport).items():
        found[key] = conforming(kind, document.get(key), key)
    values = [(part["name"], [tuple(sorted(item["values"])) for item in part["items"]]) for part in found["parts"]]
    whole = [name for name, _ in values] == list(_MUSE_PARTS) and all(
        items and set(items) == {_MUSE_PARTS[name]} for name, items in values
    )
    named = {frozenset(found["metrics"]), frozenset(found["retrained"]["metrics"])} == {frozenset(_MUSE_METRICS)}
    if not whole or not named or found["benchmark"] not in ("muse/books", "muse/news"):
        raise MeaninglessError("no result of this benchmark")
    return found


# Stores of sweeps.


def make_store(folder: Path) -> None:
    store = FinishedPassages(folder)
    store.add({"k" * 64: Continuation("a text", (-0.5, -1.25), (True, False)), "m" * 64: Continuation("é", (), ())})
    (path,) = folder.glob("*.json")
    path.rename(folder / "records.json")


def read_store(folder: Path) -> Any:
    store = FinishedPassages(folder)
    return {key: dict(vars(found)) for key, found in store._records.items()}


def sealed_store(document: Any) -> Any:
    if not isinstance(document, dict) or "records" not in document:
        return document
    try:
        return {**document, "sha256": _digest(_reread(document["records"]))}
    except (MeaninglessError, TypeError, ValueError, RecursionError):
        return document


def expected_store(document: Any, folder: Path) -> Any:
    document = _reread(_loaded(document) if isinstance(document, bytes) else document)
    try:
        if document["format"] != "hf_taskvec/evaluation-store" or _whole(document["version"]) != 1:
            raise MeaninglessError("another format")
        if document["sha256"] != _digest(document["records"]):
            raise MeaninglessError("another checksum")
        found = {}
        for record in _typed(document["records"], list):
            likely = [_number(each) for each in _typed(record["log_probs"], list)]
            hits = [{0: False, 1: True}[_whole(each)] for each in _typed(record["hits"], list)]
            if len(likely) != len(hits) or _typed(record["key"], str) in found:
                raise MeaninglessError("another number of hits, or a key twice")
            found[record["key"]] = {"text": _typed(record["text"], str), "log_probs": likely, "hits": hits}
        return found
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise MeaninglessError(str(error)[:100]) from None


# Training.

_RECORD = {
    "key": "k" * 64,
    "losses": [3.5, 3.0, 2.5, 2.25],
    "epoch_losses": [3.25, 2.375],
    "steps": 4,
    "timing": {"tokens_per_second": 100.5, "peak_bytes": 4096},
    "vectors": ["epoch-1", "epoch-2"],
}


def make_record(folder: Path) -> None:
    write_record(folder, _RECORD)


def read_record(folder: Path) -> Any:
    found = dict(vars(Finetuned.load(folder)))
    found["vectors"] = [str(path.relative_to(folder)) for path in found["vectors"]]
    return {**found, "folder": None, "finished": is_record_of(folder, "k" * 64)}


def expected_record(document: Any, folder: Path) -> Any:
    document = _reread(_loaded(document) if isinstance(document, bytes) else document)
    try:
        losses = [_number(loss) for loss in _typed(document["losses"], list)]
        names = [_typed(name, str) for name in _typed(document["vectors"], list)]
        if any(name in ("", ".", "..") or "/" in name or "\0" in name for name in names):
            raise MeaninglessError("a vector outside the folder")
        return {
            "folder": None,
            "losses": losses,
            "epoch_losses": [_number(loss) for loss in _typed(document["epoch_losses"], list)],
            "steps": _whole(document["steps"]),
            "tokens_per_second": _number(document["timing"]["tokens_per_second"]),
            "vectors": [f"vectors/{name}" for name in names],
            "peak_bytes": None if (peak := document["timing"].get("peak_bytes")) is None else _whole(peak),
            "finished": document.get("key") == "k" * 64,
        }
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise MeaninglessError(str(error)[:100]) from None


_REPAIR = {"key": "k" * 64, "steps": 4, "tokens": 512, "seconds": 1.5, "epoch_losses": [3.25, 2.375], "peak_bytes": 64}


def make_repair(folder: Path) -> None:
    write_repair(folder / REPAIR_RECORD, _REPAIR)


def read_repair(folder: Path) -> Any:
    finished = is_repair_of(folder / REPAIR_RECORD, "k" * 64)
    return {**vars(read_figures(folder)), "finished": finished}


def expected_repair(document: Any, folder: Path) -> Any:
    document = _reread(_loaded(document) if isinstance(document, bytes) else document)
    try:
        return {
            "steps": _whole(document["steps"]),
            "tokens": _whole(document["tokens"]),
            "seconds": _number(document["seconds"]),
            "epoch_losses": [_number(loss) for loss in _typed(document["epoch_losses"], list)],
            "peak_bytes": None if (peak := document.get("peak_bytes")) is None else _whole(peak),
            "finished": document.get("key") == "k" * 64,
        }
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise MeaninglessError(str(error)[:100]) from None


_FORGOTTEN = ForgetRecord(
    schema="hf_taskvec/forgotten",
    version=1,
    library="hf_taskvec 1.0",
    outcome="perhaps",
    sentence="the edit is the gentlest",
    edit="-1.5*forget, repaired (4 epochs)",
    written=True,
    vector_tokens=512,
    vector_seconds=1.5,
    tried=(EditCost("-1.5*forget, repaired (4 epochs)", "repair", "-1.5*forget + repair", 4, 512, 2.5),),
)
_OUTCOMES = ("forgotten", "perhaps", "contradicted", "not_reached")
_KINDS = ("negate", "project", "learned", "repair")


def make_forgotten(folder: Path) -> None:
    write_forgotten(folder, _FORGOTTEN)


def read_forgotten(folder: Path) -> Any:
    return asdict(read_forget_record(folder))


def expected_forgotten(document: Any, folder: Path) -> Any:
    document = _reread(_loaded(document) if isinstance(document, bytes) else document)

    def cost(found: Any) -> Any:
        texts = {name: _typed(found[name], str) for name in ("name", "kind", "expression")}
        if texts["kind"] not in _KINDS:
            raise MeaninglessError("no such kind")
        numbers = {"steps": _whole(found["steps"]), "tokens": _whole(found["tokens"])}
        return {**texts, **numbers, "seconds": _number(found["seconds"])}

    try:
        if (document["schema"], _whole(document["version"])) != ("hf_taskvec/forgotten", 1):
            raise MeaninglessError("another file")
        if document["outcome"] not in _OUTCOMES:
            raise MeaninglessError("no such outcome")
        return {
            **{name: document[name] for name in ("schema", "version", "outcome")},
            **{name: _typed(document[name], str) for name in ("library", "sentence", "edit")},
            "written": _typed(document["written"], bool),
            "vector_tokens": _whole(document["vector_tokens"]),
            "vector_seconds": _number(document["vector_seconds"]),
            "tried": [cost(found) for found in _typed(document["tried"], list)],
        }
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise MeaninglessError(str(error)[:100]) from None


def make_trained_books(folder: Path) -> None:
    write_record(folder, {**_RECORD, "books": ["a" * 64, "b" * 64]})


def read_trained_books(folder: Path) -> Any:
    model = types.SimpleNamespace(config=types.SimpleNamespace(_name_or_path=str(folder)))
    return sorted(recorded_books(model))


def expected_trained_books(document: Any, folder: Path) -> Any:
    """The texts in the list; what cannot be read tells of no book."""
    try:
        found = _typed(_reread(_loaded(document) if isinstance(document, bytes) else document), dict)["books"]
        return sorted({each for each in _typed(found, list) if isinstance(each, str)})
    except (MeaninglessError, LookupError):
        return []


def _trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def make_state(folder: Path) -> None:
    model, optimizer = _trained()
    save_state(folder, "k" * 64, [2.5, 1.5], model, optimizer, write=True)


def read_state(folder: Path) -> Any:
    saved = find_state(folder)
    assert saved is not None
    model, optimizer = _trained()
    load_state(saved, model, optimizer)
    parts = {
        f"{part}/{name}": tensor.clone()
        for name, parameter in model.named_parameters()
        for part, tensor in {"weight": parameter.data, **optimizer.state[parameter]}.items()
    }
    return {"key": saved.key, "losses": list(saved.losses), **parts}


def expected_state(document: Any, folder: Path) -> Any:
    """Every tensor as it stands in the file, where it has the shape and the dtype that it was saved with."""
    try:
        content = (folder / TRAINING_STATE).read_bytes()
        found = load_safetensors(content)
        metadata = SafetensorsHeader().parse(content)["__metadata__"]
        losses = found.pop("losses")
        if losses.dtype != torch.float64 or losses.dim() != 1 or not bool(torch.isfinite(losses).all()):
            raise MeaninglessError("no losses")
        model, _ = _trained()
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        wanted = {f"{part}/{n}": () if part == "step" else tuple(shapes[n]) for n in shapes for part in _PARTS}
        parts = {}
        for name, shape in wanted.items():
            if tuple(found[name].shape) != shape or found[name].dtype != torch.float32:
                raise MeaninglessError(f"{name} of another shape")
            parts[name] = found[name]
        return {"key": _typed(metadata["key"], str), "losses": losses.tolist(), **parts}
    except (SafetensorError, LookupError, TypeError, ValueError, RuntimeError) as error:
        raise MeaninglessError(str(error)[:100]) from None


_PARTS = ("weight", "step", "exp_avg", "exp_avg_sq")

# Notes of interrupted work.


def make_note(folder: Path) -> None:
    finished = FinishedFiles(folder, "a job")
    for name in ("one.safetensors", "two.safetensors"):
        (folder / name).write_bytes(name.encode() * 10)
        finished.add(name, {})


def read_note(folder: Path) -> Any:
    finished = FinishedFiles.of_interrupted_run(folder, "a job", ["one.safetensors", "two.safetensors"])
    kept = sorted(path.name for path in folder.iterdir() if path.suffix == ".safetensors")
    assert kept == sorted(finished._digests), "what is not finished is removed, and nothing else"
    return {"finished": kept}


def expected_note(document: Any, folder: Path) -> Any:
    """A file counts only if the note has its very digest, which the valid note has."""
    nothing: dict[str, Any] = {"finished": []}
    try:
        document = _reread(_loaded(document) if isinstance(document, bytes) else document)
        valid = json.loads((folder.parents[1] / "valid" / "folder" / ".progress.json").read_text())["files"]
        if document["job"] != "a job":
            return nothing
        return AnyOf((nothing, {"finished": sorted(n for n in valid if document["files"].get(n) == valid[n])}))
    except (MeaninglessError, LookupError, TypeError, AttributeError):
        return nothing


_SETTINGS = {"inputs": {"A": "abc"}, "scales": [0.0, -0.5, 1], "seed": 1, "force": True, "rate": 1e-4, "name": None}


def make_results(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(_SETTINGS))
    (folder / "report.md").write_text("# A report")


def read_results(folder: Path) -> Any:
    return {
        "opened": open_results_folder(folder, _SETTINGS).name,
        "config": json.loads((folder / "config.json").read_text()),
    }


def expected_results(document: Any, folder: Path) -> Any:
    raise MeaninglessError("other settings")


# Rounds of tuning and merging.

_KEY = "r" * 64
_ROUND = RoundTrace(
    1, 5, (1.5, 2.5), ((1.0, 0.5), (0.5, 1.0)), ((1.0, 0.25), (0.25, 1.0)), (3.0, 4.0), (1.0, 2.0), 0.125
)
_TRACE = Trace(("one", "two"), (_ROUND,))


class _Trainer:
    start: ClassVar = {"a.weight": torch.ones(2, 3), "b": torch.zeros(4)}


def make_rounds(folder: Path) -> None:
    rounds._save_state(folder, _KEY, {"a.weight": torch.full((2, 3), 0.5), "b": torch.arange(4.0)}, _TRACE)


def read_rounds(folder: Path) -> Any:
    tasks = [rounds.Task("one"), rounds.Task("two")]
    weights, trace = rounds._resume(folder, _KEY, _Trainer(), tasks)  # type: ignore[arg-type]
    return {"weights": {name: tensor.clone() for name, tensor in weights.items()}, "trace": json.loads(trace.to_json())}


def expected_rounds(document: Any, folder: Path) -> Any:
    try:
        content = (folder / rounds.STATE).read_bytes()
        found = load_safetensors(content)
        key, trace = json.loads(SafetensorsHeader().parse(content)["__metadata__"]["rounds"])
        if key != _KEY:
            raise MeaninglessError("another key")
        weights = {}
        for name, tensor in _Trainer.start.items():
            if found[name].shape != tensor.shape or found[name].dtype != tensor.dtype:
                raise MeaninglessError("another shape")
            weights[name] = found[name]
        return {"weights": weights, "trace": _trace(json.loads(trace))}
    except (SafetensorError, LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise MeaninglessError(str(error)[:100]) from None


def _trace(document: Any) -> Any:
    document = _reread(document)
    if document.get("tasks") != ["one", "two"]:
        raise MeaninglessError("other tasks")
    hints = typing.get_type_hints(RoundTrace)
    each = [_typed(one, dict) for one in _typed(document.get("rounds"), list)]
    return {
        "tasks": ["one", "two"],
        "rounds": [{key: _nested(hints[key], one[key], key) for key in hints} for one in each],
    }


def _nested(kind: Any, value: Any, where: str) -> Any:
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple:
        return [_nested(inner[0], each, where) for each in _typed(value, list)]
    return conforming(kind, value, where)


def make_trace(folder: Path) -> None:
    _TRACE.save(folder / "trace.json")


def read_trace(folder: Path) -> Any:
    return json.loads(Trace.from_json((folder / "trace.json").read_text("utf-8", errors="replace")).to_json())


def expected_trace(document: Any, folder: Path) -> Any:
    if isinstance(document, bytes):
        document = _loaded(document.decode(errors="replace").encode())
    document = _reread(document)
    try:
        tasks = [_typed(task, str) for task in _typed(document["tasks"], list)]
        return {**_trace({**document, "tasks": ["one", "two"]}), "tasks": tasks}
    except (LookupError, TypeError, AttributeError) as error:
        raise MeaninglessError(str(error)[:100]) from None


# Points of a landscape.

_POINTS = "k" * 64


def make_points(folder: Path) -> None:
    points = _FinishedPoints(folder, _POINTS, ("one", "two"))
    points.add(0, 0, {"one": 1.5, "two": 2.5})
    points.add(0, 1, {"one": 1.25, "two": 3.5})


def read_points(folder: Path) -> Any:
    return {f"{x},{y}": losses for (x, y), losses in _FinishedPoints(folder, _POINTS, ("one", "two")).losses.items()}


def expected_points(document: Any, folder: Path) -> Any:
    try:
        if isinstance(document, bytes):
            document = [json.loads(line) for line in document.decode().split("\n")[:-1]]
        head, *points = [_reread(line) for line in (document if isinstance(document, list) else [document])]
        if head["key"] != _POINTS or any(set(point["losses"]) != {"one", "two"} for point in points):
            raise MeaninglessError("another key, or other data")
        return {
            f"{_whole(p['x'])},{_whole(p['y'])}": {
                name: _number(loss) for name, loss in _typed(p["losses"], dict).items()
            }
            for p in points
        }
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise MeaninglessError(str(error)[:100]) from None


_RESUME = "hf_taskvec.experiments.multitask.rounds:_resume"
_REPORTING = "hf_taskvec.evaluation.reporting"

TARGETS = [
    Target(
        "report",
        (f"{_REPORTING}.report_files:load_report",),
        "report.json",
        Json(),
        make_report,
        read_report,
        expected_report,
        share=2,
    ),
    Target(
        "report of the version before",
        (f"{_REPORTING}.report_files:load_report",),
        REPORT_JSON,
        Json(),
        make_earlier_report,
        read_earlier_report,
    ),
    Target(
        "audit",
        (f"{_REPORTING}.report_files:load_report",),
        AUDIT_JSON,
        Json(),
        make_audit,
        read_audit,
        expected_audit,
        share=2,
    ),
    Target(
        "report of a benchmark",
        (f"{_REPORTING}.report_files:load_report",),
        BENCHMARK_JSON,
        Json(),
        make_benchmark,
        read_benchmark,
        expected_benchmark,
    ),
    Target(
        "store of a sweep",
        ("hf_taskvec.evaluation.asking.finished_passages:_read",),
        "records.json",
        Json(),
        make_store,
        read_store,
        expected_store,
        sealed_store,
        share=2,
    ),
    Target(
        "training record",
        ("hf_taskvec.training.run_record:Finetuned.load", "hf_taskvec.training.run_record:is_record_of"),
        TRAINING_RECORD,
        Json(),
        make_record,
        read_record,
        expected_record,
    ),
    Target(
        "repair record",
        ("hf_taskvec.training.repair_record:read_figures", "hf_taskvec.training.repair_record:is_repair_of"),
        REPAIR_RECORD,
        Json(),
        make_repair,
        read_repair,
        expected_repair,
    ),
    Target(
        "record of a forgotten book",
        ("hf_taskvec.forgetting.forgotten:read_forget_record",),
        FORGOTTEN_RECORD,
        Json(),
        make_forgotten,
        read_forgotten,
        expected_forgotten,
    ),
    Target(
        "books of a training record",
        ("hf_taskvec.models.trained_books:recorded_books",),
        TRAINING_RECORD,
        Json(),
        make_trained_books,
        read_trained_books,
        expected_trained_books,
    ),
    Target(
        "training state",
        ("hf_taskvec.training.saved_state:find_state", "hf_taskvec.training.saved_state:load_state"),
        TRAINING_STATE,
        SafetensorsHeader(),
        make_state,
        read_state,
        expected_state,
        by_bytes=0.3,
    ),
    Target(
        "note of finished files",
        ("hf_taskvec.application.finished_files:_noted", "hf_taskvec.application.finished_files:_digest"),
        ".progress.json",
        Json(),
        make_note,
        read_note,
        expected_note,
        writes=True,
    ),
    Target(
        "results folder",
        ("hf_taskvec.files.results_folder:open_results_folder",),
        "config.json",
        Json(),
        make_results,
        read_results,
        expected_results,
        writes=True,
    ),
    Target(
        "rounds",
        (_RESUME,),
        rounds.STATE,
        SafetensorsHeader("rounds", twice=True),
        make_rounds,
        read_rounds,
        expected_rounds,
        by_bytes=0.3,
    ),
    Target(
        "trace of rounds",
        ("hf_taskvec.experiments.multitask.round_trace:Trace.from_json",),
        "trace.json",
        Json(),
        make_trace,
        read_trace,
        expected_trace,
    ),
    Target(
        "points of a landscape",
        ("hf_taskvec.analysis.landscapes:_FinishedPoints.__init__",),
        f"landscape-{_POINTS[:16]}.jsonl",
        JsonLines(),
        make_points,
        read_points,
        expected_points,
        writes=True,
    ),
]
