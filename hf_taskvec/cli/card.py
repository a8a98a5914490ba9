"""`taskvec card`: the model card of what was written."""

from typing import Annotated

import typer

from hf_taskvec import filenames
from hf_taskvec.atomic import write_bytes
from hf_taskvec.cli.arguments import (
    ArtifactArgument,
    BaseModelOption,
    CardReportOption,
    DatasetsOption,
    DebugOption,
    JsonOption,
    PurposeOption,
    TokenOption,
)
from hf_taskvec.cli.command_record import record_command
from hf_taskvec.cli.results import CommandResult
from hf_taskvec.errors import OutputError
from hf_taskvec.files.foreign_files import write_card_file


def card_command(
    folder: ArtifactArgument,
    report: CardReportOption = None,
    repo_id: Annotated[str | None, typer.Option("--repo-id", metavar="ID", help="Where it will be pushed.")] = None,
    base_model: BaseModelOption = None,
    dataset: DatasetsOption = None,
    purpose: PurposeOption = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a README.md that is there.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the card instead of writing it.")] = False,
    json: JsonOption = False,
    debug: DebugOption = False,
    token: TokenOption = None,
) -> None:
    """Write the card of a model, an adapter or a vector.

    It is FOLDER/README.md, to read and to change before `taskvec push`.
    The report's tables and plots are put beside it, in FOLDER/report.
    """
    from hf_taskvec.publishing.card_evaluation import find_report, published_report
    from hf_taskvec.publishing.model_card import card_for
    from hf_taskvec.publishing.written_folder import open_artifact

    artifact = open_artifact(folder)
    path = folder / filenames.MODEL_CARD
    if path.exists() and not overwrite and not dry_run:
        raise OutputError(f"{folder.name} has a README.md already. Pass --overwrite to replace it.")
    found = find_report(artifact, report)
    datasets = dataset or []
    text = card_for(
        artifact, repo_id=repo_id, report=found, base_model=base_model, datasets=datasets, purpose=purpose, token=token
    )
    if dry_run:
        return CommandResult({"dry_run": True, "card": text}, [text]).show(json)
    if found is not None:
        beside = folder / filenames.REPORT_FOLDER
        beside.mkdir(exist_ok=True)
        for name, content in published_report(found).items():
            # A report.json that is there may still have its texts, which the published one lacks.
            if name != filenames.REPORT_JSON or not (beside / name).exists():
                write_bytes(beside / name, content)
    write_card_file(folder, text)
    record_command(folder)
    CommandResult({"card": str(path)}, [f"{path}: written"]).show(json)
    return None
