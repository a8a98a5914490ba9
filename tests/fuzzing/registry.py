"""Every file that the package reads: which target changes it, or why none does."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from fuzzing import model_targets, quantised_targets, run_targets, text_targets, vector_targets
from fuzzing.runner import Target

TARGETS: list[Target] = [
    *vector_targets.TARGETS,
    *model_targets.TARGETS,
    *quantised_targets.TARGETS,
    *run_targets.TARGETS,
    *text_targets.TARGETS,
]

_TRANSFORMERS = "transformers reads it, from a folder whose config and weights were read here before"
_DISTRIBUTED = "damaged at random in tests/models/test_distributed_checkpoint.py"
#: `module:function` that reads a file, or a text of one, without a target
EXEMPT = {
    "hf_taskvec.application.serving:max_lora_rank": "two fields, each of which must be a rank",
    "hf_taskvec.application.peft_loading:check_loads": "PEFT reads what was written just before",
    "hf_taskvec.algebra.token_rows:token_row": "a name that begins and ends as ours do; any other text is no row",
    "hf_taskvec.algebra.token_rows:unquoted": "texts that the schema of a record has checked, letter by letter",
    "hf_taskvec.cli.requantised:requantised_totals": "the record that the command wrote just before",
    "hf_taskvec.evaluation.benchmarks.data_sources:_load": "datasets reads it; each value of its rows is checked after",
    "hf_taskvec.evaluation.reporting.report_page:_file": "a file of this package",
    "hf_taskvec.experiments.smollm:_convert": "a file of an installed package",
    "hf_taskvec.integrations.lm_eval_passages:_tokenizer_and_config": _TRANSFORMERS,
    "hf_taskvec.integrations.lm_eval_passages:book_scores": "a column that the task itself made, in the same process",
    "hf_taskvec.models.checkpoint:file_digests.digest": "bytes for a digest; whatever they are",
    "hf_taskvec.models.distributed_checkpoint:DistributedFiles.map_of": _DISTRIBUTED,
    "hf_taskvec.models.distributed_checkpoint:_RowsOfParts._opened": _DISTRIBUTED,
    "hf_taskvec.models.distributed_checkpoint:_RowsOfParts._placed": _DISTRIBUTED,
    "hf_taskvec.models.distributed_checkpoint:_of_shards": _DISTRIBUTED,
    "hf_taskvec.models.remote_files:_starts": "a header that safetensors itself has checked; see test_hub_to_hub.py",
    "hf_taskvec.publishing.uploaded_shards:uploaded_shard": "what an interrupted push left; a valid one names content",
    "hf_taskvec.models.restricted_pickle:read_pickled_index": _DISTRIBUTED,
    "hf_taskvec.models.layout:_layout_of_json": "a text that was made of a config, as a key of the cache",
    "hf_taskvec.models.layout:_layout_of_class": "the same of a class of somebody's own",
    "hf_taskvec.models.locations:_cached": "the name of a snapshot, of which only letters and digits are taken",
    "hf_taskvec.models.loading:load_for_evaluation": _TRANSFORMERS,
    "hf_taskvec.models.loading:load_tokenizer": _TRANSFORMERS,
    "hf_taskvec.peak_memory:_status": "the kernel's own",
    "hf_taskvec.publishing.card_front_matter:with_card": "a card from the Hub; its metadata is read as any card's",
    "hf_taskvec.training.memory_estimate:_free_in_container": "the kernel's own",
    "hf_taskvec.training.trained_model:TrainingBase.load": _TRANSFORMERS,
    "hf_taskvec.training.trained_model:save_model": "PEFT wrote it in the line before",
}

_FUNCTIONS = {"read_json", "parse_json", "parse_yaml", "safe_open", "load_file", "load_from_disk", "load_dataset"}
_METHODS = {"read_text", "read_bytes", "from_pretrained", "safe_load"}
_MODULES = {"json": {"load", "loads"}, "yaml": {"load", "parse"}, "torch": {"load"}, "pickle": {"load", "loads"}}


def readers(folder: Path, package: str) -> Iterator[str]:
    """Each function of a package that reads a file, as `module:function`."""
    for path in sorted(folder.rglob("*.py")):
        module = ".".join([package, *path.relative_to(folder).with_suffix("").parts]).removesuffix(".__init__")
        for name, node in _functions(ast.parse(path.read_text()), ()):
            if any(isinstance(each, ast.Call) and _reads(each) for each in _own_nodes(node)):
                yield f"{module}:{name}"


def _functions(node: ast.AST, above: tuple[str, ...]) -> Iterator[tuple[str, ast.AST]]:
    """Each function with its name and those of the classes around it; the module itself is called `<module>`."""
    if isinstance(node, ast.Module):
        yield "<module>", node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield ".".join([*above, child.name]), child
            yield from _functions(child, (*above, child.name))
        else:
            yield from _functions(child, (*above, child.name) if isinstance(child, ast.ClassDef) else above)


def _own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """What stands in a function, but not in one inside it."""
    for child in ast.iter_child_nodes(function):
        yield child
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _own_nodes(child)


def _reads(call: ast.Call) -> bool:
    called = call.func
    if isinstance(called, ast.Name):
        return called.id in _FUNCTIONS or (called.id == "open" and _opens_to_read(call.args[1:]))
    if not isinstance(called, ast.Attribute):
        return False
    of = called.value.id if isinstance(called.value, ast.Name) else ""
    if called.attr == "open":
        return of != "os" and _opens_to_read(call.args)  # os.open() is for what locks and syncs
    return called.attr in _FUNCTIONS | _METHODS or called.attr in _MODULES.get(of, ())


def _opens_to_read(arguments: list[ast.expr]) -> bool:
    mode = arguments[0].value if arguments and isinstance(arguments[0], ast.Constant) else "r"
    return "r" in str(mode)
