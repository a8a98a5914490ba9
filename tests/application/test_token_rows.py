"""Fine-tunes with other added tokens meet by token: against weights that are put together by hand."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny_models import make, shake, tuned_copy
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AddedToken, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from hf_taskvec import TaskVector, TaskVectorError
from hf_taskvec.application.token_rows import add_tokens
from hf_taskvec.cli import main
from hf_taskvec.errors import MismatchError, UnsupportedError
from hf_taskvec.models.added_tokens import added_tokens

WORDS = ["<unk>", *"abcdefghijklmno"]  # 16 tokens
THINK = AddedToken("<think>", special=True, normalized=False)
TOOL = AddedToken("<tool>", lstrip=True)
BOTH = "<both>"


def tokenizer_with(*tokens: Any) -> PreTrainedTokenizerFast:
    inner = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>")
    for token in tokens:
        made.add_tokens([token])
    return made


@dataclass
class Case:
    """A base and two fine-tunes, live and in folders, each with its tokenizer."""

    models: dict[str, Any]
    tokenizers: dict[str, Any]
    folder: Path

    def at(self, name: str) -> Path:
        return self.folder / name

    def vector(self, name: str, live: bool = False) -> TaskVector:
        if not live:
            return TaskVector.from_finetuned(self.at("base"), self.at(name), name=name, vocabulary="union")
        pair = self.tokenizers["base"], self.tokenizers[name]
        base, tuned = self.models["base"], self.models[name]
        return TaskVector.from_finetuned(base, tuned, name=name, vocabulary="union", tokenizers=pair)


@pytest.fixture(params=["tied", "untied", "spare rows", "bf16"])
def case(request: Any, tmp_path: Path) -> Case:
    """Of `spare rows` the base has rows for tokens that it has not, as padded vocabularies do; its copies keep them."""
    spare = request.param == "spare rows"
    dtype = torch.bfloat16 if request.param == "bf16" else torch.float32
    base = make("llama", dtype, vocab_size=24 if spare else 16, tie_word_embeddings=request.param == "tied")
    made = {"base": base}
    tokenizers = {
        "base": tokenizer_with(),
        "a": tokenizer_with(THINK, BOTH),
        "b": tokenizer_with(TOOL, BOTH, '<"quoted\\">'),
    }
    for seed, name in enumerate(("a", "b"), 5):
        model = copy.deepcopy(base)
        if not spare:
            torch.manual_seed(seed)
            model.resize_token_embeddings(len(tokenizers[name]), mean_resizing=False)
        made[name] = shake(model, 0.05, seed)
    found = Case(made, tokenizers, tmp_path)
    for name, model in made.items():
        model.save_pretrained(found.at(name))
        tokenizers[name].save_pretrained(found.at(name))
    return found


def run(*arguments: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        main([str(each) for each in arguments])
    assert not ended.value.code


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: each for file in folder.glob("*.safetensors") for name, each in load_file(file).items()}


def by_hand(case: Case, scales: dict[str, float]) -> tuple[dict[str, torch.Tensor], list[str]]:
    """base + Σ λ(tuned − base) in fp64, rows by token: those of added tokens are λ times the fine-tune's."""
    stored = {name: weights(case.at(name)) for name in ("base", *scales)}
    words = list(WORDS)
    for name in scales:
        vocabulary = sorted(case.tokenizers[name].get_vocab().items(), key=lambda each: each[1])
        words += [token for token, _ in vocabulary if token not in words]
    result = {}
    for name, old in stored["base"].items():
        whole = old.double()
        if "embed" in name or "lm_head" in name:
            whole = torch.zeros(max(len(words), old.shape[0]), old.shape[1], dtype=torch.float64)
            whole[: len(WORDS)] = old[: len(WORDS)].double()
            whole[len(words) : old.shape[0]] = old[len(words) :].double()
            for tuned, scale in scales.items():
                new, ids = stored[tuned][name].double(), case.tokenizers[tuned].get_vocab()
                for row, word in enumerate(words):
                    if row < len(WORDS):
                        whole[row] += scale * (new[row] - old[row].double())
                    elif word in ids:
                        whole[row] += scale * new[ids[word]]
        else:
            whole = whole + sum(scale * (stored[t][name].double() - old.double()) for t, scale in scales.items())
        result[name] = whole.to(old.dtype)
    return result, words


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], exact: bool) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].shape == tensor.shape, name
        if exact:
            assert torch.equal(found[name], tensor), name
        else:
            torch.testing.assert_close(
                found[name], tensor, rtol=2e-7 if tensor.dtype == torch.float32 else 8e-3, atol=1e-9
            )


def test_one_fine_tune_comes_back_with_its_tokens(case: Case) -> None:
    out = case.vector("a").apply(case.at("base"), case.at("out"))
    expected, words = by_hand(case, {"a": 1.0})
    assert_same(weights(out), expected, exact=True)
    assert words[len(WORDS) :] == ["<think>", BOTH]
    tuned, found = weights(case.at("a")), weights(out)
    for name in ("model.embed_tokens.weight", "model.norm.weight"):
        assert torch.equal(found[name][:18], tuned[name][:18])
    read = AutoTokenizer.from_pretrained(out)
    assert read.get_vocab() == case.tokenizers["a"].get_vocab()
    assert read.added_tokens_decoder == case.tokenizers["a"].added_tokens_decoder
    assert AutoModelForCausalLM.from_pretrained(out).config.vocab_size == tuned["model.embed_tokens.weight"].shape[0]


@pytest.mark.parametrize("saved", [False, True], ids=["as extracted", "saved and loaded"])
def test_two_fine_tunes_meet_by_token(case: Case, saved: bool) -> None:
    scales = {"a": 0.5, "b": -0.75}
    a, b = case.vector("a"), case.vector("b")
    if saved:
        a, b = (TaskVector.load(each.save(case.at(f"v{each.expression}"))) for each in (a, b))
    both = 0.5 * a - 0.75 * b
    out = both.apply(case.at("base"), case.at("out"))
    expected, words = by_hand(case, scales)
    assert words[len(WORDS) :] == ["<think>", BOTH, "<tool>", '<"quoted\\">']
    assert_same(weights(out), expected, exact=False)
    read = AutoTokenizer.from_pretrained(out)
    assert [read.convert_ids_to_tokens(number) for number in range(len(words))] == words
    attributes = {str(each): each for each in read.added_tokens_decoder.values()}
    assert attributes["<think>"].special and attributes["<tool>"].lstrip and not attributes["<tool>"].special
    model = AutoModelForCausalLM.from_pretrained(out)
    assert read("a <tool> <think> b", return_tensors="pt").input_ids.tolist() == [[1, 18, 16, 2]]
    assert model(**read("a <tool> <think>", return_tensors="pt")).logits.isfinite().all()


def test_the_order_of_a_sum_moves_rows_and_nothing_else(case: Case) -> None:
    a, b = case.vector("a"), case.vector("b")
    folders = (a + b).apply(case.at("base"), case.at("ab")), (b + a).apply(case.at("base"), case.at("ba"))
    one, other = ((weights(each), AutoTokenizer.from_pretrained(each).get_vocab()) for each in folders)
    assert one[1].keys() == other[1].keys() and one[1] != other[1]
    for name in ("model.embed_tokens.weight", *(["lm_head.weight"] if "lm_head.weight" in one[0] else [])):
        for token, row in one[1].items():
            assert torch.equal(one[0][name][row], other[0][name][other[1][token]])


def test_a_token_that_the_model_has_keeps_its_row_and_adds_up(case: Case) -> None:
    """b's vector on a's model: the token of both is where a has it, and both rows are added."""
    out = case.vector("b").apply(case.at("a"), case.at("out"))
    read, found = AutoTokenizer.from_pretrained(out), weights(out)["model.embed_tokens.weight"]
    of_a, of_b = (weights(case.at(name))["model.embed_tokens.weight"].double() for name in "ab")
    assert read.get_vocab()["<think>"] == 16 and read.get_vocab()[BOTH] == 17 and read.get_vocab()["<tool>"] == 18
    assert torch.equal(found[17], (of_a[17] + of_b[17]).to(found.dtype))
    assert torch.equal(found[16], of_a[16].to(found.dtype)) and torch.equal(found[18], of_b[16].to(found.dtype))


def test_live_models_tell_where_their_tokenizers_are(case: Case) -> None:
    base, tuned = (AutoModelForCausalLM.from_pretrained(case.at(name), dtype="auto") for name in ("base", "a"))
    found = TaskVector.from_finetuned(base, tuned, vocabulary="union")
    assert set(found) == set(case.vector("a")) and found.provenance.added_tokens["<think>"] == "special"
    with pytest.raises(TaskVectorError, match="does not say where it came from"):
        TaskVector.from_finetuned(base, case.models["a"], vocabulary="union")
    with pytest.raises(TaskVectorError, match="a tokenizer, a folder or a Hub id is needed, not int"):
        TaskVector.from_finetuned(base, tuned, vocabulary="union", tokenizers=(3, None))


def test_live_models_give_the_same_and_can_be_edited(case: Case) -> None:
    files, live = (0.5 * case.vector("a", each) - 0.75 * case.vector("b", each) for each in (False, True))
    assert set(live) == set(files)
    for name in files:
        assert torch.equal(live.dense(name, "float64"), files.dense(name, "float64")), name
    expected = weights(live.apply(case.at("base"), case.at("out")))
    model, tokenizer = copy.deepcopy(case.models["base"]), copy.deepcopy(case.tokenizers["base"])
    with pytest.raises(UnsupportedError, match=r"rows of added tokens \('<think>'.*add_tokens"):
        live.edit(model)
    placed = add_tokens(live, model, tokenizer)
    assert tokenizer.get_vocab() == AutoTokenizer.from_pretrained(case.at("out")).get_vocab()
    grown = {name: each.clone() for name, each in model.state_dict().items()}
    with placed.applied_to(model):
        found = model.state_dict()
        assert_same({name: found[name] for name in expected}, expected, exact=True)
    assert all(torch.equal(each, grown[name]) for name, each in model.state_dict().items())
    assert not grown["model.embed_tokens.weight"][16:20].any()


def test_a_part_of_the_rows_grows_all_that_have_to_be_as_high(case: Case) -> None:
    vector = case.vector("a").filter(include='model.embed_tokens.weight["<think>"]')
    out = vector.apply(case.at("base"), case.at("out"), scale=2.0)
    base, found, tuned = (weights(case.at(name)) for name in ("base", "out", "a"))
    for name, old in base.items():
        expected = old
        if "embed" in name or "lm_head" in name:
            expected = torch.zeros(max(17, old.shape[0]), old.shape[1], dtype=old.dtype)
            expected[: old.shape[0]] = old
            expected[16] = 2 * tuned[name][16] if "embed" in name else 0
        assert torch.equal(found[name], expected), name
    assert AutoModelForCausalLM.from_pretrained(out).config.vocab_size == max(
        17, base["model.embed_tokens.weight"].shape[0]
    )


def test_the_command_line_extracts_calculates_and_applies(case: Case) -> None:
    base = case.at("base")
    for name in "ab":
        run("extract", base, case.at(name), "--vocabulary", "union", "-o", case.at(f"v{name}"))
    run("combine", "0.5*a - 0.75*b", f"a={case.at('va')}", f"b={case.at('vb')}", "-o", case.at("sum"))
    run("apply", case.at("sum"), base, "-o", case.at("out"), "--tokenizer", base)
    assert_same(weights(case.at("out")), by_hand(case, {"a": 0.5, "b": -0.75})[0], exact=False)


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    base = make("llama", vocab_size=16)
    tuned = tuned_copy(base)
    tuned.resize_token_embeddings(18)
    for name, model, tokens in (("base", base, ()), ("tuned", tuned, (THINK, TOOL))):
        model.save_pretrained(tmp_path / name)
        tokenizer_with(*tokens).save_pretrained(tmp_path / name)
    return tmp_path / "base", tmp_path / "tuned"


def test_tokenizers_may_lie_elsewhere(pair: tuple[Path, Path], tmp_path: Path) -> None:
    base, tuned = pair
    expected = TaskVector.from_finetuned(base, tuned, vocabulary="union")
    for each in pair:
        (each / "tokenizers").mkdir()
        for file in each.glob("tokenizer*.json"):
            file.rename(each / "tokenizers" / file.name)
    with pytest.raises(TaskVectorError, match=r"base has no tokenizer .*Save the model's tokenizer beside it"):
        TaskVector.from_finetuned(base, tuned, vocabulary="union")
    given = base / "tokenizers", AutoTokenizer.from_pretrained(tuned / "tokenizers")
    vector = TaskVector.from_finetuned(base, tuned, vocabulary="union", tokenizers=given)
    assert set(vector) == set(expected) and 'model.embed_tokens.weight["<tool>"]' in vector
    with pytest.raises(TaskVectorError, match="base has no tokenizer"):
        vector.apply(base, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    out = vector.apply(base, tmp_path / "out", tokenizer=given[0])
    assert AutoTokenizer.from_pretrained(out).get_vocab() == given[1].get_vocab()
    with pytest.raises(TaskVectorError, match=r"tokenizer= is for vectors .* vocabulary='union'"):
        vector.filter(exclude='*"<*').apply(base, tmp_path / "other", tokenizer=given[0])
    with pytest.raises(TaskVectorError, match="tokenizers= is a pair"):
        TaskVector.from_finetuned(base, tuned, tokenizers=given)


def test_tokenizers_that_do_not_belong_together_are_refused(pair: tuple[Path, Path]) -> None:
    base, tuned = pair
    moved = json.loads((tuned / "tokenizer.json").read_text())
    moved["model"]["vocab"].update({"a": 2, "b": 1})
    (tuned / "tokenizer.json").write_text(json.dumps(moved))
    with pytest.raises(MismatchError, match=r"tokenizers of base and tuned number tokens \('a', 'b'\)"):
        TaskVector.from_finetuned(base, tuned, vocabulary="union")
    moved["model"]["vocab"] = {word: number for number, word in enumerate([*WORDS[:-1], "other"])}
    (tuned / "tokenizer.json").write_text(json.dumps(moved))
    with pytest.raises(MismatchError, match=r"have other tokens \('other', 'o'\).*added tokens alone"):
        TaskVector.from_finetuned(base, tuned, vocabulary="union")


def test_a_token_without_a_row_is_refused(pair: tuple[Path, Path]) -> None:
    base, tuned = pair
    tokenizer_with(THINK, TOOL, BOTH).save_pretrained(tuned)
    with pytest.raises(MismatchError, match="has 18 rows in the fine-tune, but its tokenizer calls '<both>' 18"):
        TaskVector.from_finetuned(base, tuned, vocabulary="union")


def test_a_token_of_the_base_that_is_gone_does_not_count(pair: tuple[Path, Path]) -> None:
    """A reserved token that a fine-tune gave another name: a new token, and the old one stays."""
    one, other = tokenizer_with("<reserved>"), tokenizer_with("<named>")
    assert added_tokens(one, other, "both").ids == {"<named>": 16}


def test_damaged_records_of_tokens_are_refused(pair: tuple[Path, Path], tmp_path: Path) -> None:
    from hf_taskvec.files.vector_schema import checksum

    folder = TaskVector.from_finetuned(*pair, vocabulary="union").save(tmp_path / "v")
    record = json.loads((folder / "taskvec.json").read_text())
    (said,) = [each["tuned"]["added"] for each in record["provenance"]["origins"]]
    assert said == {'"<think>"': "special", '"<tool>"': "normalized lstrip"}
    for wrong in ({"<think>": "special"}, {'"<think>': ""}, {'"\\q"': ""}, {'"<think>"': "<b>"}):
        record["provenance"]["origins"][0]["tuned"]["added"] = wrong
        record["checksum"] = checksum(record)
        (folder / "taskvec.json").write_text(json.dumps(record))
        with pytest.raises(TaskVectorError):
            TaskVector.load(folder)


def test_a_packed_embedding_is_not_cleared_in_silence(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Whatever is stored in fewer bits keeps what it holds, or the call is refused."""
    base, tuned = pair
    vector = TaskVector.from_finetuned(base, tuned, vocabulary="union")
    state = weights(base)
    state["model.embed_tokens.weight"] = state["model.embed_tokens.weight"].to(torch.float8_e4m3fn)
    state["model.embed_tokens.weight_scale_inv"] = torch.ones(1, 1)
    (base / "model.safetensors").unlink()
    save_file(state, base / "model.safetensors")
    config = json.loads((base / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (base / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedError, match="requantise='bf16'"):
        vector.apply(base, tmp_path / "out", requantise="same")
