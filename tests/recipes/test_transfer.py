"""`recipes/transfer.py`, shrunk: what it compares and leaves, with its own books and with given vectors."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from support import launch

from hf_taskvec import TaskVector, TaskVectorError
from hf_taskvec.analysis import recommend_scales
from hf_taskvec.experiments.config_options import read_config
from hf_taskvec.experiments.transfer.transfer_config import TransferConfig
from hf_taskvec.experiments.transfer.transfer_results import THEORY, TransferResults

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "recipes" / "configs" / "transfer"
SMALL = {
    "words": 1200,
    "section-words": 120,
    "general-words": 1500,
    "pretrain-epochs": 1,
    "epochs": 3,
    "hidden-size": 32,
    "layers": 1,
    "vocabulary": 700,
    "unrelated": 1,
    "block-length": 40,
    "learning-rate": 4e-3,
    "rows": 12,
    "fit-steps": 4,
}


@pytest.fixture(scope="module")
def main() -> Callable[[list[str]], TransferResults]:
    spec = importlib.util.spec_from_file_location("transfer_recipe", ROOT / "recipes" / "transfer.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: Callable[[list[str]], TransferResults] = module.main
    return found


@pytest.fixture(scope="module")
def finished(main: Callable[[list[str]], TransferResults], tmp_path_factory: pytest.TempPathFactory) -> tuple:
    output = tmp_path_factory.mktemp("transfer") / "out"
    flags = [part for name, value in SMALL.items() for part in (f"--{name}", str(value))]
    return main([*flags, "--output", str(output)]), output


def test_each_book_in_turn_is_new_and_all_models_are_compared(finished: tuple[TransferResults, Path]) -> None:
    results, output = finished
    names = [book.name for book in results.books]
    assert len(set(names)) == 3
    for book in results.books:
        others = [name for name in names if name != book.name]
        titles = [each.title for each in book.compared]
        assert titles[:4] == ["θ_0", *(f"{name} alone" for name in others), "the mean"]
        assert {"learned λ", "fine-tuned on it"} <= set(titles) and book.best_single in others
        start, single = book.find("θ_0"), book.find(f"{book.best_single} alone")
        assert start is not None and single is not None
        for each in book.compared:  # both differences are of the losses, paired
            assert each.gain.value == pytest.approx(start.loss.value - each.loss.value)
            assert each.over_single.value == pytest.approx(single.loss.value - each.loss.value)
            assert set(each.scales) <= set(others)  # nothing is combined from the new book's own vector
        own = book.find("fine-tuned on it")
        assert own is not None and own.gain.low > 0
    report = (output / "report.md").read_text("utf-8")
    assert all(book.sentence in report for book in results.books) and str(output) not in report
    assert json.loads((output / "results.json").read_text("utf-8"))["books"][0]["name"] == names[0]


def test_the_scales_are_those_of_the_theorem_and_the_saved_vector_is_their_sum(
    finished: tuple[TransferResults, Path],
) -> None:
    results, output = finished
    found = [(book, book.find(THEORY)) for book in results.books]
    book, compared = next((book, each) for book, each in found if each is not None)
    gammas = book.correlations[0]
    assert gammas.form == "relative" and gammas.stand_in == "a gradient step"
    corrected = [max(-1.0, min(1.0, gamma / gammas.share)) for gamma in gammas.gammas.values()]
    expected = recommend_scales(gammas=corrected, margin=0.2).transfer
    assert expected is not None and list(compared.scales.values()) == pytest.approx(expected.scales)
    stages = {path.name.rpartition("-")[0]: path for path in (output / "stages").iterdir()}
    saved = TaskVector.load(output / "vectors" / book.name.replace("-", "_"))
    parts = [
        scale * TaskVector.from_finetuned(stages["base"], stages[name.replace("-", "_")])
        for name, scale in compared.scales.items()
    ]
    name = next(iter(saved))
    whole = sum((part.dense(name) for part in parts[1:]), parts[0].dense(name))
    assert saved.dense(name).allclose(whole, atol=1e-6)


def test_vectors_and_a_new_book_may_be_given_and_nothing_is_fine_tuned(
    main: Callable[[list[str]], TransferResults], finished: tuple[TransferResults, Path], tmp_path: Path
) -> None:
    from hf_taskvec.experiments.synthetic_library.book_writer import write_library

    library = write_library(0, words=1200, general_words=1500, unrelated=1)
    stages = {path.name.rpartition("-")[0]: path for path in (finished[1] / "stages").iterdir()}
    written = [*library.series, *library.unrelated]
    for book in written:
        (tmp_path / f"{book.name}.txt").write_text(book.text)
    first, new, other = (str(tmp_path / f"{book.name}.txt") for book in written)
    tuned = [str(stages[Path(path).stem.replace("-", "_")]) for path in (first, other)]
    flags = ["--base-model", str(stages["base"]), "--books", first, other, "--vectors", *tuned, "--new-books", new]
    flags += ["--section-words", "120", "--block-length", "40", "--rows", "12", "--fit-steps", "0"]
    results = main([*flags, "--output", str(tmp_path / "out")])
    assert [book.name for book in results.books] == [Path(new).stem] and not (tmp_path / "out" / "stages").exists()
    titles = [each.title for each in results.books[0].compared]
    assert "fine-tuned on it" not in titles and "learned λ" not in titles
    label = Path(new).stem.replace("-", "_")
    if THEORY in titles:
        assert (tmp_path / "out" / "models" / label / "model.safetensors").exists()


def test_every_config_loads_and_bad_settings_are_refused(tmp_path: Path) -> None:
    for path in CONFIGS.glob("*.yaml"):
        given = {} if path.stem == "default" else {"base_model": "base", "books": ["a", "b", "c"]}
        TransferConfig(**{**read_config(TransferConfig, path.stem, CONFIGS), **given})
    for changes, message in [
        ({"books": ["a"]}, "brings its own books"),
        ({"base_model": "base", "books": ["a", "b"]}, "at least 3 books, as each is in turn"),
        ({"base_model": "base", "books": ["a"], "new_books": ["b"]}, "at least 2 books, as Theorem 3"),
        ({"base_model": "base", "books": ["a", "b", "c"], "vectors": ["v"]}, "needs 3 fine-tunes"),
        ({"rows": 2}, "rows=2 must be at least 4"),
        ({"margin": 0.0}, "margin=0.0 must be positive"),
        ({"beta": 1.5}, "beta=1.5 must be between 0 and 1"),
        ({"unrelated": 9}, "1 to 7 unrelated books"),
    ]:
        with pytest.raises(TaskVectorError, match=message):
            TransferConfig(**changes)


def test_what_is_wrong_with_the_books_is_said_before_any_work(tmp_path: Path) -> None:
    for name in ("short", "again"):
        (tmp_path / f"{name}.txt").write_text("".join(f"Sentence {n} of a long {name} story. " for n in range(800)))
    (tmp_path / "copy.txt").write_text((tmp_path / "again.txt").read_text())
    for books, message in [
        (["short.txt", "missing.txt", "again.txt"], "there is no book at"),
        (["short.txt", "again.txt", "short.txt"], "two books are called 'short'"),
        (["short.txt", "again.txt", "copy.txt"], "again and copy are the same text, or mostly"),
    ]:
        flags = ["--base-model", "none", "--books", *(str(tmp_path / book) for book in books)]
        run = launch.run(ROOT / "recipes" / "transfer.py", *flags, "--output", str(tmp_path / "out"))
        assert run.returncode == 1 and message in run.stderr and "Traceback" not in run.stderr
    assert not (tmp_path / "out").exists()
