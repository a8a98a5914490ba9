"""The tutorials: run anew, and shown as pages.

    python docs/site/tutorials.py [NAME …]      # runs them in an empty folder, and stores what they print and draw

The notebooks in `docs/tutorials/` are the source: edit them in Jupyter, then run this.
"""

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "tutorials"


def run(path: Path) -> Any:
    """A notebook, executed from top to bottom in a new folder; what fails raises."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(
            notebook, timeout=1200, kernel_name="python3", resources={"metadata": {"path": folder}}
        ).execute()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.metadata.pop("execution", None)
            cell.outputs = [each for each in cell.outputs if each.get("name") != "stderr"]
    notebook.metadata.pop("language_info", None)
    return notebook


def as_markdown(path: Path) -> str:
    """A notebook as a page: its texts, its code, and what that printed and drew."""
    import json

    lines = [f"[The notebook]({path.name}), to download and run.", ""]
    for number, cell in enumerate(json.loads(path.read_text("utf-8"))["cells"]):
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            lines.insert(0, source + "\n") if number == 0 else lines.append(source + "\n")
            continue
        lines += ["```python", source, "```", ""]
        for output in cell["outputs"]:
            data = output.get("data", {})
            if "image/png" in data:
                picture = "".join(data["image/png"]).replace("\n", "")
                lines += [f'<img alt="what the code above draws" src="data:image/png;base64,{picture}">', ""]
            elif "text/html" in data:
                lines += [
                    '<div style="overflow-x: auto">',
                    "".join(data["text/html"]).replace("\n\n", "\n"),
                    "</div>",
                    "",
                ]
            else:
                text = "".join(output.get("text") or data.get("text/plain") or [])
                lines += ["```text", text.rstrip(), "```", ""]
    return "\n".join(lines)


def main(names: Sequence[str]) -> None:
    """Run some tutorials, or all, and store their outputs."""
    import nbformat

    for path in sorted(FOLDER.glob("*.ipynb")):
        if not names or path.stem in names:
            print(path.stem, flush=True)
            nbformat.write(run(path), path)


if __name__ == "__main__":
    main(sys.argv[1:])
