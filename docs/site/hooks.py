"""What the site needs beyond its pages: the reference, made from the code; and links that lead out of `docs/`."""

import dataclasses
import importlib
import inspect
import json
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
#: the packages whose public names have a page, and what the page is about
PACKAGES = {
    "hf_taskvec": "Everyday names: vectors, sums, forgetting",
    "hf_taskvec.evaluation": "Books, protocols, sweeps, reports",
    "hf_taskvec.training": "Fine-tuning, repairing, learned coefficients",
    "hf_taskvec.forgetting": "Forgetting a book in one call",
    "hf_taskvec.auditing": "Attacks on an edited model",
    "hf_taskvec.merging": "Rules and the search for λ",
    "hf_taskvec.analysis": "Correlation, geometry, ranks, linearity",
    "hf_taskvec.publishing": "Cards and the Hub",
    "hf_taskvec.integrations": "Inside other tools",
    "hf_taskvec.errors": "Errors",
}
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!https?:|mailto:|#)([^)\s]+)\)")
_NOT_RUN = re.compile(r"^<!-- not run: .* -->\n", re.M)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the reference to the navigation, and to the how-tos the pages that it does not name."""
    sys.path.insert(0, str(ROOT / "docs" / "site"))  # where the modules beside this one are found
    pages = {f"reference/{name.removeprefix('hf_taskvec.')}.md": _package_page(name) for name in PACKAGES}
    pages["reference/command-line.md"] = _command_pages()
    pages["reference/files.md"] = _file_formats()
    from tutorials import FOLDER, as_markdown

    tutorials = {f"tutorials/{path.stem}.md": as_markdown(path) for path in sorted(FOLDER.glob("*.ipynb"))}
    for path, text in {**pages, **tutorials}.items():
        files.append(File.generated(config, path, content=text))
    assert config.nav is not None
    for part in config.nav:
        if "Reference" in part:
            part["Reference"] = ["reference/index.md", *pages]
        if "Tutorials" in part:
            part["Tutorials"] = list(tutorials)
        if "How to" in part:
            known = set(re.findall(r"[\w/-]+\.md", str(config.nav)))
            found = [str(path.relative_to(ROOT / "docs")) for path in sorted((ROOT / "docs").glob("*.md"))]
            found += [f"how-to/{path.name}" for path in sorted((ROOT / "docs" / "how-to").glob("*.md"))]
            part["How to"] = ["how-to/index.md", *(path for path in found if path not in known)]
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Notes for the tests go; what is no page of the site is named by its path in the repository."""
    here = (ROOT / "docs" / page.file.src_uri).parent

    def outside(found: re.Match[str]) -> str:
        picture, text, target = found.groups()
        if target.endswith(".ipynb") and "/" in target:  # a page shows it
            return f"[{text}]({target.removesuffix('.ipynb')}.md)"
        path = (here / target.partition("#")[0]).resolve()
        inside = path.is_relative_to(ROOT / "docs") and files.get_file_from_path(str(path.relative_to(ROOT / "docs")))
        if picture or inside or not path.exists():  # what does not exist is for mkdocs to complain about
            return found[0]
        name = path.relative_to(ROOT).as_posix()
        if config.repo_url:
            return f"[{text}]({config.repo_url.rstrip('/')}/blob/main/{name})"
        return f"{text} (`{name}`)" if name not in text else text

    parts = re.split(r"(^```.*?^```$)", _NOT_RUN.sub("", markdown), flags=re.M | re.S)
    return "".join(part if number % 2 else _LINK.sub(outside, part) for number, part in enumerate(parts))


def _package_page(name: str) -> str:
    """All public names of a package, each under the name by which it is imported."""
    module = importlib.import_module(name)
    lines = [f"# {PACKAGES[name]}", "", f"`{name}`", ""]
    if name == "hf_taskvec.errors":
        names = [key for key, value in vars(module).items() if inspect.isclass(value) and value.__module__ == name]
    else:
        names = [key for key in sorted(module.__all__) if not key.startswith("_")]
    for key in names:
        value = getattr(module, key)
        home = getattr(value, "__module__", None)
        if name == "hf_taskvec" and (page := _other_page(key)):
            lines += [f"## {key}", "", f"See [{page}]({page}.md#{home}.{key}).", ""]
            continue
        if inspect.isclass(value) or inspect.isfunction(value):
            lines += [f"::: {home}.{value.__qualname__}", "    options:", f"      heading: {key}", ""]
            continue
        text = inspect.getdoc(value) if inspect.ismodule(value) else None
        kind = f"A `{type(value).__name__}`." if text is None else text.partition("\n\n")[0]
        lines += [f"## {key}", "", kind, ""]
        if inspect.ismodule(value) and hasattr(value, "__all__"):
            lines += [f"Its names: {', '.join(f'`{each}`' for each in value.__all__)}.", ""]
        elif isinstance(value, tuple | frozenset | list):
            lines += [f"{', '.join(f'`{each}`' for each in value)}", ""]
    return "\n".join(lines)


def _other_page(key: str) -> str | None:
    """The page of the package that has an everyday name, too."""
    for name in PACKAGES:
        module = importlib.import_module(name)
        if name != "hf_taskvec" and hasattr(module, key) and not inspect.ismodule(getattr(module, key)):
            return name.removeprefix("hf_taskvec.")
    return None


def _command_pages() -> str:
    """Every command with its options, as `--help` tells them."""
    import typer

    from hf_taskvec.cli.app import app

    lines = ["# The command line", ""]
    _describe(typer.main.get_command(app), "taskvec", lines)
    return "\n".join(lines)


def _describe(command: Any, name: str, lines: list[str]) -> None:
    lines += [f"## {name}", "", _paragraphs(command.help), ""]
    options = []
    for each in command.params:
        if each.name == "help" or getattr(each, "hidden", False):
            continue
        named = ", ".join(f"`{option}`" for option in [*each.opts, *each.secondary_opts])
        named = named if each.param_type_name == "option" else f"`{(each.metavar or each.name).upper()}`"
        options.append(f"| {named} | {_cell(getattr(each, 'help', None))} |")
    if options:
        lines += ["| option | what it does |", "|---|---|", *options, ""]
    for key, each in getattr(command, "commands", {}).items():
        if not each.hidden:
            _describe(each, f"{name} {key}", lines)


def _paragraphs(text: str | None) -> str:
    parts = inspect.cleandoc(text or "").replace("\b", "").split("\n\n")
    return "\n\n".join(f"```\n{part}\n```" if part.startswith((" ", "taskvec ")) else part for part in parts)


def _cell(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|").replace("<", "&lt;")


def _file_formats() -> str:
    """What is in the files that the library writes."""
    from schemas import json_schema

    from hf_taskvec.evaluation import UnlearningReport
    from hf_taskvec.evaluation.reporting import unlearning_report
    from hf_taskvec.files import vector_schema

    schema = json.dumps(vector_schema.VECTOR, indent=1, ensure_ascii=False)
    about = inspect.getdoc(unlearning_report) or ""
    later = frozenset(
        each.name for each in dataclasses.fields(UnlearningReport) if each.default is not dataclasses.MISSING
    )
    report = json.dumps(json_schema(UnlearningReport, later), indent=1, ensure_ascii=False)
    return "\n\n".join(
        [
            "# Files",
            "## report.json",
            about,
            f"As a JSON schema, version {unlearning_report.REPORT_VERSION}. `schema` and `version` stand before these "
            "fields, and the protocol has its `hash`, too.",
            f"```json\n{report}\n```",
            "## taskvec.json",
            f"The record of a saved vector, format {vector_schema.FORMAT}, as a JSON schema:",
            f"```json\n{schema}\n```",
        ]
    )
