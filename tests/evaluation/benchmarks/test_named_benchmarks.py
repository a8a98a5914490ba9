"""Benchmarks by name: what they hold, and what is refused before any long work."""

import re
import socket
import subprocess
import sys

import pytest
from support.benchmark_data import muse_data, put_on_hub, tofu_data

from hf_taskvec.errors import BadValueError, MissingFileError, MissingNameError
from hf_taskvec.evaluation import PromptForm, load_benchmark
from hf_taskvec.evaluation.benchmarks.named_benchmarks import DEFINITIONS
from hf_taskvec.evaluation.benchmarks.prompt_forms import PROMPT_FORMS


def test_tofu_has_its_rows_in_the_places_that_its_columns_say(hub):
    put_on_hub(hub, "tofu/forget10")
    benchmark = load_benchmark("tofu/forget10")
    row = tofu_data()["forget10_perturbed", "train"][3]
    item = benchmark.part("forget").items[3]
    assert (item.prompt, item.answer) == (row["question"], row["answer"])
    assert (item.paraphrase, list(item.wrong)) == (row["paraphrased_answer"], row["perturbed_answer"])
    fact = benchmark.part("world_facts").items[0]
    assert fact.paraphrase == fact.answer and len(fact.wrong) == 2  # these have no paraphrase
    assert benchmark.part("holdout").items[0].wrong == ()
    assert benchmark.training["retain"].config == "retain90" and benchmark.training["forget"].config == "forget10"


def test_muse_has_its_examples_and_texts(hub):
    put_on_hub(hub, "muse/news")
    benchmark = load_benchmark("muse/news")
    shot = muse_data()["knowmem", "retain_qa_icl"][1]
    assert benchmark.part("knowmem_retain").examples[1] == (shot["question"], shot["answer"])
    assert benchmark.part("verbmem_forget").items[2].answer == muse_data()["verbmem", "forget"][2]["gt"]
    assert benchmark.part("privleak_holdout").items[0].prompt == ""
    assert {part.source.repo for part in benchmark.parts} == {"muse-bench/MUSE-News"}


def test_every_benchmark_asks_as_its_authors_do():
    def settings(name):
        return {part.name: part.protocol.decoding.max_new_tokens for part in DEFINITIONS[name].parts}

    muse = settings("muse/books")
    assert (muse["verbmem_forget"], muse["knowmem_forget"], muse["knowmem_retain"]) == (128, 32, 32)
    assert settings("tofu/forget01")["forget"] == 200
    configs = {name: DEFINITIONS[name].parts[0].source.config for name in DEFINITIONS if name.startswith("tofu")}
    assert list(configs.values()) == ["forget01_perturbed", "forget05_perturbed", "forget10_perturbed"]
    assert [DEFINITIONS[name].training["retain"].config for name in configs] == ["retain99", "retain95", "retain90"]
    for definition in DEFINITIONS.values():
        assert all(part.protocol.decoding.greedy for part in definition.parts)


def test_a_name_that_is_not_there_is_answered_with_the_nearest():
    with pytest.raises(
        MissingNameError, match=r"no benchmark 'muse/book'\. Did you mean 'muse/books'\?.*tofu/forget01"
    ):
        load_benchmark("muse/book")
    with pytest.raises(MissingNameError, match=r"no prompt form 'chatt'\. Did you mean 'chat'\?"):
        load_benchmark("muse/books", prompt="chatt")


def _without(data, key, column):
    return {**data, key: [{k: v for k, v in row.items() if k != column} for row in data[key]]}


def _with(data, key, column, value):
    first, *rest = data[key]
    return {**data, key: [*rest, {**first, column: value}]}


FORGET = ("forget10_perturbed", "train")


@pytest.mark.parametrize(
    ("data", "error", "words"),
    [
        (
            _without(tofu_data(), FORGET, "paraphrased_answer"),
            MissingNameError,
            r"locuslab/TOFU \(forget10_perturbed, split train\) has no column 'paraphrased_answer'.*perturbed_answer",
        ),
        (
            _with(tofu_data(), ("holdout10", "train"), "answer", "  "),
            BadValueError,
            r"locuslab/TOFU \(holdout10, split train\), column 'answer', row 7: a text is expected, not '  '",
        ),
        (
            {**tofu_data(), FORGET: [{**row, "perturbed_answer": "Ada"} for row in tofu_data()[FORGET]]},
            BadValueError,
            r"column 'perturbed_answer', row 0: a list of texts is expected, not 'Ada'",
        ),
        (
            {**tofu_data(), FORGET: [{**row, "answer": number} for number, row in enumerate(tofu_data()[FORGET])]},
            BadValueError,
            r"\(forget10_perturbed, split train\), column 'answer', row 0: a text is expected, not 0",
        ),
        (
            _with(tofu_data(), FORGET, "perturbed_answer", []),
            BadValueError,
            r"column 'perturbed_answer', row 7: a list of texts is expected, not \[\]",
        ),
        (
            {**tofu_data(), ("retain_perturbed", "train"): tofu_data()[FORGET]},
            BadValueError,
            r"'forget' \(.*\) and 'retain' \(.*retain_perturbed.*\) hold the same rows",
        ),
    ],
    ids=["no column", "blank", "no list", "a number", "an empty list", "the same rows"],
)
def test_a_data_set_of_another_schema_is_refused_by_name(hub, data, error, words):
    put_on_hub(hub, "tofu/forget10", data)
    with pytest.raises(error, match=words):
        load_benchmark("tofu/forget10")


def test_an_empty_split_is_refused_by_name(hub):
    put_on_hub(hub, "muse/books", {**muse_data(), ("privleak", "holdout"): []})
    with pytest.raises(MissingFileError, match=r"muse-bench/MUSE-Books \(privleak, split holdout\).*no rows"):
        load_benchmark("muse/books")


def test_a_damaged_file_is_refused_by_name(hub):
    files = hub.files("locuslab/TOFU", put_on_hub(hub, "tofu/forget10"), "dataset")
    files["holdout10/train.jsonl"] = b'{"question": "half'
    hub.add_repo("locuslab/TOFU", files, repo_type="dataset")
    with pytest.raises(BadValueError, match=r"locuslab/TOFU \(holdout10, split train\) cannot be read: JSON"):
        load_benchmark("tofu/forget10")


def test_what_is_not_on_the_hub_is_named_with_what_to_do(hub):
    with pytest.raises(MissingFileError, match=r"no data set muse-bench/MUSE-Books \(verbmem, split forget\).*token="):
        load_benchmark("muse/books")
    put_on_hub(hub, "muse/books", {key: rows for key, rows in muse_data().items() if key[0] != "privleak"})
    with pytest.raises(MissingFileError, match=r"MUSE-Books \(privleak, split forget\)"):
        load_benchmark("muse/books")
    with pytest.raises(MissingFileError, match=r"at revision 'v9' on the Hub.*Check revision="):
        load_benchmark("muse/books", revision="v9")


def test_a_revision_is_followed(hub):
    first = put_on_hub(hub, "tofu/forget10")
    changed = tofu_data()
    changed[FORGET] = changed[FORGET][:5]
    put_on_hub(hub, "tofu/forget10", changed)
    assert len(load_benchmark("tofu/forget10").part("forget").items) == 5
    assert len(load_benchmark("tofu/forget10", revision=first).part("forget").items) == 8


def told(tmp_path, **environment):
    """What the user reads, in a process of its own: the client reads its endpoint once."""
    code = "from hf_taskvec.evaluation import load_benchmark; load_benchmark('muse/books')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"HF_HOME": str(tmp_path), "PYTHONPATH": ":".join(sys.path), **environment},
        capture_output=True,
        text=True,
    )
    return done.stderr.strip().splitlines()[-1]


NO_NETWORK = (
    r"hf_taskvec\.errors\.HubError: the data set muse-bench/MUSE-Books \(verbmem, split forget\).*with a network"
)


def test_without_a_network_the_error_says_what_to_do(tmp_path):
    assert re.match(NO_NETWORK, told(tmp_path, HF_HUB_OFFLINE="1"))


@pytest.mark.slow  # the client tries for half a minute
def test_a_hub_that_does_not_answer_is_no_missing_data_set(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert re.match(NO_NETWORK, told(tmp_path, HF_ENDPOINT=f"http://127.0.0.1:{port}"))


def test_importing_downloads_nothing(hub):
    code = "import hf_taskvec.evaluation as e, sys; e.load_benchmark; print('datasets' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False" and hub.count() == 0


# Prompts.


def test_tags_are_written_as_muse_and_tofu_write_them():
    asked = PROMPT_FORMS["question"].text("Q2", [("Q0", "A0"), ("Q1", "A1")])
    assert asked == "Question: Q0\nAnswer: A0\n\nQuestion: Q1\nAnswer: A1\n\nQuestion: Q2\nAnswer: "
    assert PROMPT_FORMS["llama-2-chat"].text("Q") == "[INST] Q [/INST]"


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }} {{ date_string }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_a_chat_is_the_tokenizers_own_without_a_second_beginning():
    from support.tiny_books import make_tokenizer
    from tokenizers.processors import TemplateProcessing

    tokenizer = make_tokenizer()
    tokenizer.bos_token = "</s>"
    tokenizer.chat_template = TEMPLATE
    plain = PROMPT_FORMS["chat"].text("Q", [("q", "a")], tokenizer)
    body = "<system 10 Apr 2025>You are a helpful assistant.<user 10 Apr 2025>q<assistant 10 Apr 2025>a"
    assert plain == f"</s>{body}<user 10 Apr 2025>Q<assistant>"  # this tokenizer adds no beginning itself
    tokenizer._tokenizer.post_processor = TemplateProcessing(single="</s> $A", special_tokens=[("</s>", 0)])
    again = PROMPT_FORMS["chat"].text("Q", [("q", "a")], tokenizer)
    ids = tokenizer(again)["input_ids"]
    assert ids.count(0) == 1 and ids[0] == 0
    assert ids == tokenizer(plain, add_special_tokens=False)["input_ids"]


def test_a_chat_without_a_template_or_against_it_says_what_to_give():
    from support.tiny_books import make_tokenizer

    tokenizer = make_tokenizer()
    with pytest.raises(BadValueError, match=r"needs a chat template.*prompt='question'"):
        PROMPT_FORMS["chat"].text("Q", tokenizer=tokenizer)
    tokenizer.chat_template = "{{ raise_exception('no system message') }}"
    with pytest.raises(BadValueError, match=r"no system message.*PromptForm\('chat', chat=True\)"):
        PromptForm("mine", chat=True, system="Be brief.").text("Q", tokenizer=tokenizer)
