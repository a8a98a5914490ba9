"""Commands that face the world: card, push."""

from pathlib import Path
from typing import Annotated, Any

import typer

from hf_taskvec.cli.common import Debug, DryRun, Json, Plan, Result, Token, register, remember
from hf_taskvec.errors import OutputError

Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="What apply, adapter, extract or combine wrote.")]
CardReport = Annotated[
    Path | None, typer.Option("--report", metavar="FOLDER", help="A sweep's report; by default FOLDER/report.")
]
BaseModel = Annotated[str | None, typer.Option("--base-model", metavar="ID", help="The base's Hub id, for the card.")]
Datasets = Annotated[
    list[str] | None, typer.Option("--dataset", metavar="ID", help="Hub id of a data set, for the card.")
]
Purpose = Annotated[str | None, typer.Option("--purpose", help="Why the edit was made, in a sentence.")]


def add_to(app: typer.Typer) -> None:
    """Register the commands."""
    register(app, "Sharing", {"card": card, "push": push})


def card(
    folder: Folder,
    report: CardReport = None,
    repo_id: Annotated[str | None, typer.Option("--repo-id", metavar="ID", help="Where it will be pushed.")] = None,
    base_model: BaseModel = None,
    dataset: Datasets = None,
    purpose: Purpose = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a README.md that is there.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the card instead of writing it.")] = False,
    json: Json = False,
    debug: Debug = False,
    token: Token = None,
) -> None:
    """Write the card of a model, an adapter or a vector.

    It is FOLDER/README.md, to read and to change before `taskvec push`. The report's tables and plots are put beside it, in FOLDER/report.
    """
    from hf_taskvec.publishing.card_evaluation import find_report, published_report
    from hf_taskvec.publishing.model_card import card_for
    from hf_taskvec.publishing.written_folder import REPORT, open_artifact

    artifact = open_artifact(folder)
    path = folder / "README.md"
    if path.exists() and not overwrite and not dry_run:
        raise OutputError(f"{folder.name} has a README.md already. Pass --overwrite to replace it.")
    found = find_report(artifact, report)
    datasets = tuple(dataset or ())
    text = card_for(
        artifact, repo_id=repo_id, report=found, base_model=base_model, datasets=datasets, purpose=purpose, token=token
    )
    if dry_run:
        return Result({"dry_run": True, "card": text}, [text]).show(json)
    if found is not None:
        (folder / REPORT).mkdir(exist_ok=True)
        for name, content in published_report(found).items():
            if name != "report.json" or not (folder / REPORT / name).exists():  # that one may still have its texts
                (folder / REPORT / name).write_bytes(content)
    path.write_text(text, "utf-8")
    remember(folder)
    Result({"card": str(path)}, [f"{path}: written"]).show(json)
    return None


def push(
    folder: Folder,
    repo_id: Annotated[str, typer.Argument(metavar="REPO_ID", help="E.g. me/model; made if it does not exist.")],
    report: CardReport = None,
    base_model: BaseModel = None,
    dataset: Datasets = None,
    purpose: Purpose = None,
    private: Annotated[bool, typer.Option("--private", help="Make the repository private.")] = False,
    revision: Annotated[str | None, typer.Option(help="The branch; made if it does not exist.")] = None,
    create_pr: Annotated[bool, typer.Option("--create-pr", help="Open a pull request.")] = False,
    message: Annotated[str | None, typer.Option("--message", "-m", help="Of the commit.")] = None,
    dry_run: DryRun = False,
    json: Json = False,
    debug: Debug = False,
    token: Token = None,
) -> None:
    """Push a model, an adapter or a vector to the Hub, in one commit.

    taskvec push forgot me/forgot

    Weights, card and report go together. FOLDER/README.md is the card; without one it is made. Nothing is sent that holds a token or a local path.
    """
    from hf_taskvec.publishing.push import push_folder, what_is_pushed

    datasets = tuple(dataset or ())
    options: dict[str, Any] = {
        "report": report,
        "base_model": base_model,
        "datasets": datasets,
        "purpose": purpose,
        "token": token,
    }
    if dry_run:
        files = what_is_pushed(folder, repo_id, **options)
        sizes = {name: c.stat().st_size if isinstance(c, Path) else len(c) for name, c in files.items()}
        writes = {f"{repo_id}: {name}": nbytes for name, nbytes in sizes.items()}
        return Plan({str(folder): sum(sizes.values())}, dict(writes), 50_000_000).result(None).show(json)
    pushed = push_folder(
        folder,
        repo_id,
        private=private or None,
        revision=revision,
        create_pr=create_pr,
        commit_message=message,
        **options,
    )
    values = {**vars(pushed)}
    if not pushed.changed:
        lines = [f"{repo_id}: unchanged, no commit made"]
    else:
        lines = [f"{repo_id}: {pushed.pull_request or pushed.url}"]
    Result(values, lines).show(json)
    return None
