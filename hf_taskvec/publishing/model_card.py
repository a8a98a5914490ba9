"""Model cards: what an artifact is, how to make it again, what was measured, how to undo it, what it is not good for.

The templates are in `model_cards/`. Every value comes from the artifact's own record and a sweep's report; what is not
known is said to be unknown. Before a card is written or pushed it is checked: its metadata against a schema, its text
for paths, tokens and the user's name.
"""

import json
import shlex
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_taskvec import filenames
from hf_taskvec.algebra.provenance import ModelRecord
from hf_taskvec.errors import CorruptFileError, LeakError, OutputError
from hf_taskvec.escaping import markdown, markdown_cell, markdown_code, visible
from hf_taskvec.files.foreign_files import write_card_file
from hf_taskvec.json_files import Schema, line, read_json
from hf_taskvec.merging import rules
from hf_taskvec.models.card_metadata import front_matter
from hf_taskvec.models.folder_contents import ContentKind
from hf_taskvec.publishing.card_evaluation import evaluation_section, find_report, reported_scale
from hf_taskvec.publishing.card_front_matter import base_models, card_data, check_metadata, with_card, with_hub_id
from hf_taskvec.publishing.notation import as_code, as_formula
from hf_taskvec.publishing.privacy import check_names, check_text
from hf_taskvec.publishing.written_folder import Artifact, open_artifact

if TYPE_CHECKING:
    import jinja2

    from hf_taskvec.evaluation.reporting.unlearning_report import UnlearningReport

# Each command is a line of its own in a block of code, and begins with our own name: it cannot end the block.
_COMMANDS = Schema(
    {
        "type": "object",
        "required": ["commands"],
        "properties": {
            "commands": {
                "type": "array",
                "items": {
                    "type": "array",
                    "items": [{"const": "taskvec"}],
                    "additionalItems": line(5000) | {"minLength": 0},
                    "minItems": 1,
                },
            }
        },
    }
)
_TEMPLATES: dict[ContentKind, str] = {"model": "merged_model.md", "adapter": "adapter.md", "vector": "task_vector.md"}


def write_card(
    folder: str | Path,
    *,
    repo_id: str | None = None,
    report: "UnlearningReport | str | Path | None" = None,
    base_model: str | None = None,
    datasets: Sequence[str] = (),
    purpose: str | None = None,
    overwrite: bool = False,
    token: str | bool | None = None,
) -> Path:
    """Write the card of a model, an adapter or a vector into its folder, as README.md.

    Args:
        folder (`str` or `Path`):
            What `apply`, `to_adapter` or `save` wrote.
        repo_id (`str`, *optional*):
            Where it will be pushed to.
        report (`UnlearningReport`, `str` or `Path`, *optional*):
            Of the sweep of this edit: a report, its file or its folder; by default what the folder has under `report/`.
        base_model (`str`, *optional*):
            The base's Hub id (`"me/model"` or `"me/model@revision"`), if a copy in a folder was used.
        datasets (`Sequence[str]`, *optional*):
            Hub ids of the data sets that took part.
        purpose (`str`, *optional*):
            Why the edit was made, in a sentence; by default what the expression and the report say.
        overwrite (`bool`, *optional*, defaults to `False`):
            Replace a README.md that is there.
        token (`str` or `bool`, *optional*):
            To read the base's card, for its licence; by default that of the login.

    Returns:
        `Path`: The README.md.

    Raises:
        `OutputError`: If there is a README.md already, and `overwrite` is not set.
        `MissingFileError`: If the folder holds nothing that this library wrote.
        `MismatchError`: If the report is of another edit.
        `LeakError`: If the card would show a token, a path of this machine or the user's name.
        `BadValueError`: If an option is no Hub id where one is needed.

    Example:
        >>> from hf_taskvec.publishing import write_card
        >>> write_card("forgot", repo_id="me/forgot", purpose="To see what is left.")  # doctest: +SKIP
        PosixPath('forgot/README.md')
    """
    artifact = open_artifact(folder)
    path = artifact.folder / filenames.MODEL_CARD
    if path.exists() and not overwrite:
        raise OutputError(f"{artifact.folder.name} has a README.md already. Pass overwrite=True to replace it.")
    card = card_for(
        artifact,
        repo_id=repo_id,
        report=find_report(artifact, report),
        base_model=base_model,
        datasets=datasets,
        purpose=purpose,
        token=token,
    )
    return write_card_file(artifact.folder, card)


def card_for(
    artifact: Artifact,
    *,
    repo_id: str | None = None,
    report: "UnlearningReport | None" = None,
    base_model: str | None = None,
    datasets: Sequence[str] = (),
    purpose: str | None = None,
    token: str | bool | None = None,
) -> str:
    """The whole card of an artifact, front matter and text, checked.

    Args:
        artifact (`Artifact`):
            What the card is of; see `open_artifact`.
        repo_id (`str`, *optional*):
            Where it will be pushed to.
        report (`UnlearningReport`, *optional*):
            Of the sweep of this edit.
        base_model (`str`, *optional*):
            The base's Hub id (`"me/model"` or `"me/model@revision"`), if a copy in a folder was used.
        datasets (`Sequence[str]`, *optional*):
            Hub ids of the data sets that took part.
        purpose (`str`, *optional*):
            Why the edit was made, in a sentence; by default what the expression and the report say.
        token (`str` or `bool`, *optional*):
            To read the base's card, for its licence; by default that of the login.

    Returns:
        `str`: The card, as README.md holds it.

    Raises:
        `LeakError`: If the card would show a token, a path of this machine or the user's name.
        `BadValueError`: If an option is no Hub id where one is needed.
    """
    base = with_hub_id(artifact.base, base_model)
    base = with_card(base, token) if base else None
    others = [with_card(model, token) for model in artifact.records if model != artifact.base]
    stated = [each for model in (base, *others) if model for each in model.datasets]
    scale = reported_scale(artifact, report)
    title = (repo_id or artifact.folder.resolve().name).rsplit("/", 1)[-1]
    data = card_data(artifact, model_name=title, base=base, report=report, scale=scale, datasets=(*datasets, *stated))
    code, name = as_code(artifact.provenance), json.dumps(visible(repo_id or title), ensure_ascii=False)
    context: dict[str, Any] = {
        "metadata": data.to_yaml(),
        "title": markdown(title),
        "repo_id": name,
        "undo": markdown_code(f'(-vector).apply({name}, output="undone")'),
        "base": _described(base),
        "base_code": _loaded(base, artifact.kind == "adapter"),
        "options": _options(artifact),
        "purpose": _sentence(purpose) if purpose else _purpose(artifact, report),
        "changed": f"{artifact.changed:,}",
        "formula": as_formula(artifact.provenance),
        "origins": [
            {
                "label": origin.label,
                "how": markdown_cell(origin.how),
                "base": _described(origin.base, "–"),
                "tuned": _described(origin.tuned, "–"),
            }
            for origin in artifact.provenance.origins
        ],
        "rules": [_rule(name) for name, _ in artifact.provenance.rules],
        "folders": any(model.hub_id is None for model in artifact.records),
        "exact": all(m.hub_id and m.revision for m in artifact.records) and "..." not in code,
        "code": code,
        "scale": f"{1.0 if scale is None else scale:g}",
        "report": evaluation_section(artifact, report, scale) if report is not None else None,
        "licence": _licence(base, others),
        "versions": _versions(artifact, report),
        "command": _command(artifact.folder),
    }
    card = _templates().get_template(_TEMPLATES[artifact.kind]).render(c=context)
    free = [
        purpose or "",
        context["command"] or "",
        "" if repo_id else title,
        *_free_texts(artifact, report),
        *datasets,
    ]
    check_names(free, "the card", public=_public(artifact, base, repo_id))
    check_card(card, artifact)
    return card


def check_card(card: str, artifact: Artifact) -> None:
    """Refuse a card whose metadata is wrong, or that shows a token or a path of this machine."""
    data = front_matter(card)
    if not data:
        raise CorruptFileError("the card has no readable metadata between '---' lines on top. Write it again.")
    check_metadata(data, artifact.kind)
    check_text(card, "the card")


def _public(artifact: Artifact, base: ModelRecord | None, repo_id: str | None) -> list[str]:
    ids = [model.hub_id for model in artifact.records if model.hub_id]
    return [*ids, *base_models(artifact, base), *([repo_id] if repo_id else [])]


@cache  # with the environment, its compiled templates are kept
def _templates() -> "jinja2.Environment":
    """Those of `model_cards/`, which is inside an installed package, or beside it in a clone."""
    import jinja2

    package = Path(__file__).parents[1]
    inside = package / "model_cards"
    folder = inside if inside.is_dir() else package.parent / "model_cards"
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder), undefined=jinja2.StrictUndefined, keep_trailing_newline=True
    )


# What the templates show


def _free_texts(artifact: Artifact, report: "UnlearningReport | None") -> list[str]:
    """Whatever on the card a person named: folders, labels, books."""
    origins = [text for origin in artifact.provenance.origins for text in (origin.label, origin.how)]
    models = [model.name for model in artifact.records]
    books = [book.name for book in report.books] if report is not None else []
    return [artifact.provenance.expression, *origins, *models, *books]


def _described(model: ModelRecord | None, unknown: str = "an unknown base model") -> str:
    if model is None:
        return unknown
    fingerprint = f" `[{model.fingerprint[:12]}]`" if model.fingerprint else ""
    if model.hub_id is None:
        return f"**{markdown_cell(model.name)}**{fingerprint}"
    address = f"https://huggingface.co/{model.hub_id}" + (f"/tree/{model.revision}" if model.revision else "")
    revision = f"@{model.revision[:12]}" if model.revision else ""
    return f"[{_id_text(model.hub_id + revision)}]({address}){fingerprint}"


def _id_text(hub_id: str) -> str:
    """An id as a link's text: the `@` of a revision is no address there."""
    name, at, revision = hub_id.partition("@")
    return f"{markdown_cell(name)}{at}{markdown_cell(revision)}"


def _rule(name: str) -> dict[str, str | None]:
    """A merging rule and its paper: of a rule that we know, so that no file tells where a link goes."""
    known = rules().get(name)
    return {"name": markdown_code(name), "paper": known.paper if known else None}


def _loaded(base: ModelRecord | None, by_transformers: bool) -> str:
    if base is None:
        return '"base"'
    if base.hub_id is None:
        return json.dumps(f"./{base.name}", ensure_ascii=False)
    if base.revision is None:
        return f'"{base.hub_id}"'  # an id has no quotes, and a revision none
    revision = f'", revision="{base.revision}' if by_transformers else f"@{base.revision}"
    return f'"{base.hub_id}{revision}"'


def _options(artifact: Artifact) -> str:
    """The further arguments of the call that makes the artifact again."""
    given = dict(artifact.options)
    if artifact.kind == "adapter" and artifact.base is not None and artifact.base.hub_id is None:
        given["base"] = f"./{artifact.base.name}"
    return "".join(f", {key}={json.dumps(value, ensure_ascii=False)}" for key, value in given.items())


def _purpose(artifact: Artifact, report: "UnlearningReport | None") -> str:
    forget = [book.name for book in report.books if book.role == "forget"] if report is not None else []
    if forget:
        kept = [book.name for book in report.books if book.role == "retain"] if report is not None else []
        others = f", while it keeps {' and '.join(map(markdown, kept))}" if kept else ""
        return _sentence(f"the edit is meant to make a model forget {' and '.join(map(markdown, forget))}{others}")
    weights = [weight for _, weight in artifact.provenance.weights]
    if weights and all(weight < 0 for weight in weights):
        return "the edit subtracts what fine-tuning taught."
    if weights and all(weight > 0 for weight in weights):
        return "the edit adds what fine-tuning taught."
    return "the edit combines what several fine-tunes taught."


def _sentence(text: str) -> str:
    text = " ".join(text.split())
    return text if text.endswith((".", "!", "?")) else f"{text}."


def _licence(base: ModelRecord | None, others: list[ModelRecord]) -> str:
    found = base.license if base else None
    if found is not None:
        lines = [f"Inherited from the card of {_described(base)}: **{markdown(str(found))}**."]
    else:
        lines = [
            f"Not known: no card of {_described(base)} that states a licence was at hand. Ask its authors before you "
            "use or share this; no licence is granted here."
        ]
    stated = [f"{_described(m)}: {markdown(str(m.license))}" for m in others if m.license not in (None, found)]
    if stated:
        lines.append(f"Its other sources state licences of their own, which apply as well: {'; '.join(stated)}.")
    return "\n\n".join(lines)


def _versions(artifact: Artifact, report: "UnlearningReport | None") -> str:
    lines = [f"Written by hf_taskvec {artifact.library}."]
    if report is not None:
        listed = ", ".join(markdown(f"{name} {number}") for name, number in report.versions.items())
        plan = markdown_code(report.settings.plan[:12])
        lines.append(f"Evaluated with {listed}; seed {report.settings.seed}, plan {plan}.")
    return " ".join(lines)


def _command(folder: Path) -> str | None:
    """The command that wrote the folder, if it names no place on this machine."""
    try:
        record = read_json(folder / filenames.COMMAND_RECORD)
        _COMMANDS.check(record, filenames.COMMAND_RECORD)
        command = "\n".join(shlex.join(each) for each in record["commands"])
        check_text(command, filenames.COMMAND_RECORD)
    except (OSError, CorruptFileError, LeakError):
        return None
    return command
