"""The commands in this process: what they do, and their answers to bad input."""

import json
import re
from pathlib import Path

import pytest
import torch
from support import tiny_models, tiny_quantised
from support.command_line import COMMANDS, OF_OTHERS, Run
from support.edited_model import Edited
from support.hub_server import HubServer

from hf_taskvec import TaskVector
from hf_taskvec.cli.app import app

# Bad input: one sentence, the exit code, no traceback

AUDIT = ["audit", "vector", "tuned", "--forget", "lamps.txt"]
BAD = [
    (["extract", "nowhere/at/all", "tuned", "-o", "x"], "no folder 'all'"),
    (["extract", "me/none", "tuned", "-o", "x"], "neither a folder here nor a repository"),
    (["extract", "base", "base", "-o", "x"], "identical to its base"),
    (["extract", "base", "tuned", "base", "-o", "x"], "not 3 models"),
    (["extract", "tuned", "-o", "x"], "needs the base as well"),
    (["extract", "base", "vector", "-o", "x"], "vector is a task vector already"),
    (["extract", "base", "tuned", "-o", "vector"], "Pass --overwrite"),
    (["extract", "base", "tuned", "-o", "base"], "holds other files"),
    (["extract", "base", "tuned", "-o", "x", "--vocabulary", "shrink"], "not one of"),
    (["extract", "base", "tuned", "-o", "x", "--dtype", "float7"], "float7"),
    (["show", "base"], "taskvec extract BASE TUNED"),
    (["show", "nowhere"], "neither a folder here nor a repository"),
    (["compare", "vector"], "at least two"),
    (["compare", "a=vector", "a=vector"], "two vectors are called 'a'"),
    (["compare", "1=vector", "b=vector"], "cannot name a vector"),
    (["combine", "hp1 + hp2", "hp1=vector", "-o", "x"], "Add hp2=PATH"),
    (["combine", "hp1", "hp1=vector", "hp3=vector", "-o", "x"], "does not use 'hp3'"),
    (["combine", "hp1 *", "hp1=vector", "-o", "x"], "is not an expression"),
    (["combine", "hp1 ** 2", "hp1=vector", "-o", "x"], "all that vectors do"),
    (["combine", "__import__('os')", "hp1=vector", "-o", "x"], "no argument names|does not use|no place"),
    (["combine", "hp1.save('y')", "hp1=vector", "-o", "x"], "no place in an expression"),
    (["compress", "vector", "-o", "x"], "give one of --rank, --energy and --tolerance"),
    (["compress", "vector", "--rank", "2", "--energy", "0.5", "-o", "x"], "give one of"),
    (["compress", "vector", "--energy", "1.5", "-o", "x"], "energy"),
    (["apply", "vector", "nowhere", "-o", "x"], "neither a folder"),
    (["apply", "vector", "base", "--report", "nowhere", "-o", "x"], "no report at"),
    (["apply", "vector", "base", "--scale", "nan", "-o", "x"], "nan"),
    (["apply", "vector", "base", "-o", "base"], "holds other files"),
    (["apply", "vector", "base", "--requantise", "same", "-o", "x"], "no weight of base is stored in fewer bits"),
    (["merge", "nowhere.yaml", "-o", "x"], "no file nowhere.yaml"),
    (["merge", "lamps.txt", "-o", "x"], "must hold merge_method"),
    (["adapter", "vector", "-o", "x"], "are not low-rank"),
    (["adapter", "vector", "--dense", "lose", "-o", "x"], "not one of"),
    (["adapter", "vector", "--serve", "tgi", "-o", "x"], "--serve tgi is not one of 'vllm'"),
    (["eval", "base", "-o", "x"], "no book was given"),
    (["eval", "base", "--forget", "nowhere.txt", "-o", "x"], "no book at"),
    (["eval", "base", "--forget", "lamps.txt", "--protocol", "muse", "-o", "x"], "no protocol 'muse'"),
    (["eval", "base", "--forget", "lamps.txt", "--set", "samples", "-o", "x"], "KEY=VALUE"),
    (["eval", "nowhere", "--forget", "lamps.txt", "-o", "x"], "neither a folder"),
    (["sweep", "vector", "base", "--forget", "lamps.txt", "--scales", "a,b", "-o", "x"], "is no list of λ"),
    (["sweep", "vector", "base", "--forget", "lamps.txt", "--set", "sample=3", "-o", "x"], "Did you mean 'samples'"),
    (["sweep", "vector", "base", "--forget", "lamps.txt", "--metric", "rogue_l", "-o", "x"], "Did you mean 'rouge_l'"),
    (
        ["sweep", "vector", "base", "--forget", "lamps.txt", "--low", "0", "-o", "x"],
        "--low 0.0 and --high 1.2 must",
    ),
    (["sweep", "vector", "base", "--forget", "lamps.txt", "--rule", "margins", "-o", "x"], "Did you mean 'margin'"),
    (["sweep", "vector", "base", "--forget", "lamps.txt", "--margin", "0.1", "-o", "x"], "for --rule margin only"),
    (["sweep", "vector", "base", "--forget", "lamps.txt", "--held-out", "1", "-o", "x"], "--held-out 1.0 must be"),
    (["sweep", "vector", "base", "--all-seen", "--held-out", "0.2", "-o", "x"], "give one of them"),
    (["sweep", "vector", "base", "--forget", "lamps.txt", "--unseen", "nowhere.txt", "-o", "x"], "no book at"),
    (["choose", "nowhere", "-o", "x"], "no report at 'nowhere': the sweep writes one"),
    (["choose", "vector", "-o", "x"], "no report at"),
    (["choose", "vector", "--retain-bound", "2", "-o", "x"], "--retain-bound 2.0 must be between 0 and 1"),
    (["forget", "tuned", "--forget", "lamps.txt", "--base", "base", "-o", "x"], "no text to keep"),
    ([*AUDIT, "--attack", "relern", "--reference", "base", "-o", "x"], "Did you mean 'relearn'"),
    ([*AUDIT, "--metric", "rogue_l", "--reference", "base", "-o", "x"], "Did you mean 'rouge_l'"),
    ([*AUDIT, "--learning-rate", "-1", "--reference", "base", "-o", "x"], "--learning-rate -1.0"),
    ([*AUDIT, "--reference", "nowhere", "-o", "x"], "neither a folder"),
    ([*AUDIT, "--report", "nowhere", "--reference", "base", "-o", "x"], "no report at"),
    (["audit", "tuned", *AUDIT[2:], "--scale", "-1", "--reference", "base", "-o", "x"], "the edited model itself"),
    (["audit", "tuned", *AUDIT[2:], "--reference", "base", "-o", "x"], "no record of its base"),
    (["survival", "vector", "--base", "base", "--scheme", "nf3"], "Did you mean 'nf4'"),
    (["survival", "vector", "--base", "nowhere"], "neither a folder"),
    (["survival", "vector", "--base", "base", "--scales", "a,b"], "is no list of λ"),
    (["survival", "vector", "--base", "base", "--scales", ","], "no λ was given"),
    (["card", "base"], "no model, adapter or task vector that this library"),
    (["card", "nowhere"], "no folder 'nowhere'"),
    (["push", "base", "me/x"], "no model, adapter or task vector that this library"),
    (["push", "vector", "me/x/y/z"], "not a name for a Hub repository"),
    (["push", "vector", "other/x"], "403"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=[" ".join(each[0])[:50] for each in BAD])
def test_bad_input_is_one_sentence_and_writes_nothing(
    hub: HubServer, taskvec: Run, edited: Edited, arguments: list[str], message: str
) -> None:
    answer = taskvec(*arguments)
    assert answer.code == 1
    assert re.search(message, answer.err), answer.err
    assert answer.err.startswith("taskvec: ") and len(answer.err.strip().splitlines()) == 1
    assert "Traceback" not in answer.err and answer.out == ""
    assert not (edited.folder / "x").exists()


def test_a_vector_on_the_hub_is_one_already(hub: HubServer, taskvec: Run, edited: Edited, tmp_path: Path) -> None:
    hub.add_repo("me/vector", edited.folder / "vector")
    answer = taskvec("extract", "base", "me/vector", "-o", tmp_path / "x")
    assert answer.code == 1 and "me/vector is a task vector already" in answer.err
    assert not (tmp_path / "x").exists()


# What commands do


def test_combine_is_the_librarys_algebra(taskvec: Run, edited: Edited, tmp_path: Path) -> None:
    answer = taskvec("combine", "-0.6*a + 0.5*compress(a, rank=2)", "a=vector", "-o", tmp_path / "out", "--json")
    assert answer.code == 0, answer.err
    assert answer.json["expression"] == "-0.6*a + 0.5*compress(a, rank=2)"
    saved, v = TaskVector.load(tmp_path / "out"), edited.vector
    expected = -0.6 * v + 0.5 * v.compress(rank=2)
    for name in v:
        assert torch.equal(saved.dense(name), expected.dense(name))


def test_combine_projects_by_the_rule(taskvec: Run, edited: Edited, tmp_path: Path) -> None:
    narrow = "combine([a, compress(a, rank=1)], 'without', by='subspace')"
    expression = f"-1.2*{narrow} + 0.5*combine([a, noise(a, seed=0)], 'without')"
    answer = taskvec("combine", expression, "a=vector", "-o", tmp_path / "out", "--json")
    assert answer.code == 0, answer.err
    assert answer.json["expression"] == expression
    saved, v = TaskVector.load(tmp_path / "out"), edited.vector
    expected = -1.2 * v.without(v.compress(rank=1), by="subspace") + 0.5 * v.without(v.noise())
    assert saved.norm() > 0
    for name in v:
        assert torch.equal(saved.dense(name), expected.dense(name))


def test_show_and_compare_give_the_librarys_numbers_as_json(taskvec: Run, edited: Edited, tmp_path: Path) -> None:
    shown = taskvec("show", "vector", "--json", "--top", 3).json
    assert shown["norm"] == pytest.approx(edited.vector.norm())
    assert [each["norm"] for each in shown["largest"]] == sorted(edited.vector.norms().values(), reverse=True)[:3]
    assert shown["origins"][0]["tuned"]["name"] == "tuned"
    small = edited.vector.compress(rank=2)
    small.save(tmp_path / "small")
    compared = taskvec("compare", "a=vector", f"b={tmp_path / 'small'}", "-o", tmp_path / "heat.png", "--json").json
    assert compared["cosines"][0][1] == pytest.approx(edited.vector.cosine(small))
    assert set(compared["layers"]) == {"layer 0", "layer 1", "outside"}
    assert (tmp_path / "heat.png").read_bytes().startswith(b"\x89PNG")
    assert "compare" in json.loads((tmp_path / "heat.png.command.json").read_text())["commands"][0]
    three = taskvec(
        "compare", "a=vector", f"b={tmp_path / 'small'}", "c=vector", "-o", tmp_path / "three.png", "--json"
    )
    assert three.json["cosines"][0][2] == pytest.approx(1.0) and (tmp_path / "three.png").exists()


def test_show_and_compare_write_a_page(taskvec: Run, edited: Edited, tmp_path: Path) -> None:
    shown = taskvec("show", "vector", "--html", tmp_path / "show.html", "--json").json
    assert shown["html"] == str(tmp_path / "show.html")
    page = (tmp_path / "show.html").read_text("utf-8")
    assert f"<td>{shown['largest'][0]['name']}</td>" in page and page.count("<img ") == 1
    answer = taskvec("compare", "a=vector", "b=vector", "c=vector", "--html", tmp_path / "both.html")
    assert answer.code == 0 and answer.out.rstrip().endswith("both.html: written")
    page = (tmp_path / "both.html").read_text("utf-8")
    assert page.count("<img ") == 2 and "<td>+1.0000</td>" in page
    assert "show" in json.loads((tmp_path / "show.html.command.json").read_text())["commands"][0]
    wrong = taskvec("show", "vector", "--html", tmp_path / "show.txt")
    assert wrong.code == 1 and "must end in .html" in wrong.err


def test_survival_gives_the_librarys_shares_and_a_table_of_them(taskvec: Run, edited: Edited) -> None:
    options = ["--base", "base", "--scheme", "int8", "--scales", "0:-1:-0.5"]
    answer = taskvec("survival", "vector", *options, "--json")
    assert answer.code == 0, answer.err
    expected = [edited.vector.survival(edited.pair.base, "int8", scale=scale).to_dict() for scale in (0, -0.5, -1)]
    assert answer.json == {"scheme": "int8", "base": "base", "scales": expected}
    assert 0 == expected[0]["total"]["share"] < expected[1]["total"]["share"] < expected[2]["total"]["share"]
    shown = taskvec("survival", "vector", *options).out
    assert f"{expected[2]['total']['share']:.2%}" in shown and "Each layer at λ=-1" in shown
    assert f"{len(expected[2]['by_weight'])} matrices are quantised" in shown and "embedding" in shown


def test_an_adapters_folder_is_taken_for_its_vector(taskvec: Run, edited: Edited, tmp_path: Path) -> None:
    small = edited.vector.filter(include="*proj*").compress(rank=2)
    small.to_adapter(tmp_path / "adapter", base=edited.pair.base)
    for arguments in ([tmp_path / "adapter"], ["base", tmp_path / "adapter"]):
        out = tmp_path / f"out{len(arguments)}"
        answer = taskvec("extract", *arguments, "-o", out)
        assert answer.code == 0, answer.err
        assert TaskVector.load(out).cosine(small) == pytest.approx(1.0, abs=1e-6)
    assert taskvec("show", tmp_path / "adapter", "--json").json["low_rank"] is True


def test_a_report_goes_with_the_model(hub: HubServer, taskvec: Run, edited: Edited, tmp_path: Path) -> None:
    edited.report.save(tmp_path / "report", plots=False)
    refused = taskvec("apply", "vector", "base", "--report", tmp_path / "report", "-o", tmp_path / "out")
    assert edited.report.choice.scale is None  # two untrained models: nothing to forget
    assert refused.code == 1 and "hardly knew the book" in refused.err and "with --scale" in refused.err
    options = ["--report", tmp_path / "report", "--scale", -0.5, "-o", tmp_path / "out"]
    assert taskvec("apply", "vector", "base", *options).code == 0
    answer = taskvec("card", tmp_path / "out", "--purpose", "to see whether it works", "--repo-id", "me/x")
    assert answer.code == 0, answer.err
    card = (tmp_path / "out" / "README.md").read_text()
    assert "to see whether it works." in card and "λ = −0.5" in card
    assert (tmp_path / "out" / "report" / "scores.png").exists()
    assert taskvec("card", tmp_path / "out").code == 1
    assert taskvec("card", tmp_path / "out", "--overwrite").code == 0
    assert "# out" in taskvec("card", tmp_path / "out", "--dry-run").out
    pushed = taskvec("push", tmp_path / "out", "me/x", "--private", "-m", "Forget", "--json").json
    assert pushed["changed"] and hub.history("me/x")[0].title == "Forget"
    again = taskvec("push", tmp_path / "out", "me/x")
    assert "unchanged, no commit made" in again.out


def test_a_model_of_fewer_bits_is_written_as_is_chosen(taskvec: Run, tmp_path: Path) -> None:
    base = tiny_quantised.fp8(tmp_path / "fp8", tiny_quantised.llama())
    name = "model.layers.0.mlp.up_proj.weight"
    TaskVector.from_tensors({name: torch.full((96, 64), 0.01)}).save(tmp_path / "edit")
    assert "Pass --requantise same to store" in taskvec("apply", tmp_path / "edit", base, "-o", tmp_path / "x").err
    given = ["apply", tmp_path / "edit", base, "--requantise", "same", "-o", tmp_path / "same"]
    planned = taskvec(*given, "--dry-run", "--json").json
    answer = taskvec(*given, "--json").json
    assert answer["requantised"]["tensors"] == 1 and answer["requantised"]["lowest_share"]["name"] == name
    assert 0.5 < answer["requantised"]["lowest_share"]["share"] < 1.5
    assert answer["bytes"] <= next(iter(planned["writes"].values()))


def test_an_exported_adapter_names_its_base_and_is_pushed(
    hub: HubServer, taskvec: Run, edited: Edited, tmp_path: Path
) -> None:
    options = ["--rank", 2, "--dense", "drop", "--scale", -1, "--base", "base", "--base-name", "me/base"]
    answer = taskvec("adapter", "vector", "-o", tmp_path / "adapter", *options)
    assert answer.code == 0, answer.err
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "me/base"
    served = taskvec("adapter", "vector", "-o", tmp_path / "served", *options, "--serve", "vllm")
    assert "vllm serve me/base --enable-lora --max-lora-rank 8 --lora-modules served=" in served.out, served.err
    assert taskvec("push", tmp_path / "adapter", "me/adapter").code == 0
    assert b"library_name: peft" in hub.files("me/adapter")["README.md"]


def test_every_command_is_tested() -> None:
    assert {command.name for command in app.registered_commands} == {*COMMANDS, *OF_OTHERS}
    assert {arguments[0] for arguments, _ in BAD} == set(COMMANDS)


def test_no_command_changes_its_inputs(edited: Edited) -> None:
    """No command of this file wrote to its inputs."""
    base, tuned = ({path.name for path in folder.iterdir()} for folder in (edited.pair.base, edited.pair.tuned))
    assert base == tuned | {"README.md"}
    tiny_models.assert_gives_tuned(edited.vector, edited.pair)
