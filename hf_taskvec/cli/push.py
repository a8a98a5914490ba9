"""`taskvec push`: what was written, to the Hub."""

import warnings
from pathlib import Path
from typing import Annotated

import typer

from hf_taskvec.cli.arguments import (
    ArtifactArgument,
    BaseModelOption,
    CardReportOption,
    DatasetsOption,
    DebugOption,
    DryRunOption,
    JsonOption,
    PurposeOption,
    TokenOption,
)
from hf_taskvec.cli.dry_run import DryRun
from hf_taskvec.cli.results import CommandResult


def push_command(
    folder: ArtifactArgument,
    repo_id: Annotated[str, typer.Argument(metavar="REPO_ID", help="E.g. me/model; made if it does not exist.")],
    report: CardReportOption = None,
    base_model: BaseModelOption = None,
    dataset: DatasetsOption = None,
    purpose: PurposeOption = None,
    include: Annotated[
        list[str] | None, typer.Option("--include", metavar="FILE", help="Another file of FOLDER to push as well.")
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="Make the repository private.")] = False,
    revision: Annotated[str | None, typer.Option(help="The branch; made if it does not exist.")] = None,
    create_pr: Annotated[bool, typer.Option("--create-pr", help="Open a pull request.")] = False,
    message: Annotated[str | None, typer.Option("--message", "-m", help="Of the commit.")] = None,
    dry_run: DryRunOption = False,
    json: JsonOption = False,
    debug: DebugOption = False,
    token: TokenOption = None,
) -> None:
    """Push a model, an adapter or a vector to the Hub, in one commit.

    taskvec push forgot me/forgot

    Weights, card and report go together. FOLDER/README.md is the card; without one it is made.
    What is no part of a model, an adapter or a vector is left out. Nothing is sent that holds a token,
    a key or a local path.
    """
    from hf_taskvec.publishing.push import push_folder
    from hf_taskvec.publishing.pushed_files import files_to_push
    from hf_taskvec.publishing.written_folder import open_artifact

    datasets = dataset or []
    if dry_run:
        sent = files_to_push(
            open_artifact(folder),
            repo_id,
            report=report,
            base_model=base_model,
            datasets=datasets,
            purpose=purpose,
            include=include or (),
            token=token,
        )
        sizes = {name: c.stat().st_size if isinstance(c, Path) else len(c) for name, c in sent.files.items()}
        writes = {f"{repo_id}: {name}": nbytes for name, nbytes in sizes.items()}
        notes = [_left_out(name) for name in sent.left_out]
        return DryRun({str(folder): sum(sizes.values())}, dict(writes), 50_000_000, notes).result(None).show(json)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "left out of the push")  # told below
        pushed = push_folder(
            folder,
            repo_id,
            report=report,
            base_model=base_model,
            datasets=datasets,
            purpose=purpose,
            include=include or (),
            private=private or None,
            revision=revision,
            create_pr=create_pr,
            commit_message=message,
            token=token,
        )
    told = (pushed.pull_request or pushed.url) if pushed.changed else "unchanged, no commit made"
    CommandResult({**vars(pushed)}, [*map(_left_out, pushed.left_out), f"{repo_id}: {told}"]).show(json)
    return None


def _left_out(name: str) -> str:
    return f"{name}: left out, since it is no part of what is pushed; --include {name} pushes it"
