"""Models of every class: each is read, edited and written under the names of its own class."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from support.tiny_classes import CLASSES
from support.tiny_models import assert_gives_tuned, nearest, save_pair, tuned_copy
from transformers import (
    BertConfig,
    BertModel,
    BertPreTrainedModel,
    MusicgenConfig,
    MusicgenForConditionalGeneration,
)

from hf_taskvec import TaskVector
from hf_taskvec.errors import MismatchError, UnsupportedError
from hf_taskvec.models.checkpoint import open_checkpoint
from hf_taskvec.models.layout import layout_of_model
from hf_taskvec.models.live_model import live_checkpoint

WEIGHTS = "model.safetensors"


@pytest.mark.parametrize("name", CLASSES)
def test_a_fine_tune_of_any_class_is_given_back_and_any_scale_is_rounded_once(name: str, tmp_path: Path) -> None:
    tiny = CLASSES[name]
    base = tiny.make()
    tuned = tuned_copy(base)
    pair = save_pair(tmp_path, base, tuned)
    vector = pair.vector()
    assert open_checkpoint(pair.base).layout.architecture == name
    assert_gives_tuned(vector, pair)
    vector.save(tmp_path / "vector")
    output = TaskVector.load(tmp_path / "vector").apply(pair.base, tmp_path / "output")
    loaded, expected = (getattr(transformers, name).from_pretrained(each) for each in (output, pair.tuned))
    for key, tensor in expected.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], tensor), key
    other = load_file(vector.apply(pair.base, tmp_path / "other", scale=-0.6) / WEIGHTS)
    first, second = load_file(pair.base / WEIGHTS), load_file(pair.tuned / WEIGHTS)
    for key, tensor in first.items():
        exact = tensor.double() - 0.6 * (second[key].double() - tensor.double())
        assert torch.equal(other[key], nearest(exact, tensor.dtype)), key


@pytest.mark.parametrize("name", CLASSES)
def test_live_models_of_any_class_give_the_stored_vector_and_are_edited(name: str, tmp_path: Path) -> None:
    tiny = CLASSES[name]
    base = tiny.make()
    tuned = tuned_copy(base)
    pair = save_pair(tmp_path, base, tuned)
    vector = TaskVector.from_finetuned(base, tuned)
    assert_gives_tuned(vector, pair)
    before, expected = tiny.outputs(base), tiny.outputs(tuned)
    with vector.applied_to(base):
        assert torch.equal(tiny.outputs(base), expected) and not torch.equal(expected, before)
    assert torch.equal(tiny.outputs(base), before)


@pytest.mark.parametrize("name", CLASSES)
def test_an_attached_edit_computes_what_a_merged_one_does(name: str) -> None:
    tiny = CLASSES[name]
    base = tiny.make()
    vector = TaskVector.from_finetuned(base, tuned_copy(base, 0.1)).compress(rank=2)
    vector = vector.filter(include=[each for each in vector if vector[each].is_low_rank])
    if name.startswith("Whisper"):
        refused = pytest.raises(UnsupportedError, match=r"decoder\.embed_positions\.weight")
        with refused, vector.applied_to(base, merge=False):
            tiny.outputs(base)
        vector = vector.filter(exclude="*decoder.embed_positions.weight")
    plain = tiny.outputs(base)
    with vector.applied_to(base, -0.7):
        expected = tiny.outputs(base)
    with vector.applied_to(base, -0.7, merge=False):
        found = tiny.outputs(base)
    assert (expected - plain).abs().max() > 1e-3
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def test_rows_of_pictures_have_a_scale_each_or_are_refused() -> None:
    tiny = CLASSES["ViTForImageClassification"]
    base = tiny.make()
    vector = TaskVector.from_finetuned(base, tuned_copy(base, 0.1)).compress(rank=2)
    inner = vector.filter(include="*layer*weight", exclude=["*norm*"])
    inner = inner.filter(include=[each for each in inner if inner[each].is_low_rank])
    expected = []
    for row, scale in enumerate((0.5, -1.0)):
        with inner.applied_to(base, scale):
            expected.append(tiny.outputs(base)[row])
    with inner.applied_to(base, merge=False) as edit:
        edit.set_row_scales([0.5, -1.0])
        torch.testing.assert_close(tiny.outputs(base), torch.stack(expected), rtol=1e-3, atol=1e-4)
    head = TaskVector.from_tensors({"classifier.weight": (torch.ones(2, 1), torch.ones(1, 16))})
    with head.applied_to(base, merge=False) as edit:
        edit.set_row_scales([0.5, -1.0])
        with pytest.raises(
            ValueError, match=r"classifier.weight: its layer gives \[2, 2\] for a batch of 2 rows, which"
        ):
            tiny.outputs(base)


def test_the_class_is_the_live_model_s_own_whatever_its_config_says() -> None:
    model = CLASSES["BertForSequenceClassification"].make()
    model.config.architectures = ["BertForMaskedLM"]
    assert "classifier.weight" in live_checkpoint(model).tensors


class _TwoHeads(BertPreTrainedModel):
    """A class that nobody but this file has."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.bert = BertModel(config)
        self.one, self.other = torch.nn.Linear(16, 2), torch.nn.Linear(16, 5)
        self.post_init()


def test_a_live_model_of_somebody_s_own_class_is_known_by_it() -> None:
    base = _TwoHeads(CLASSES["BertModel"].make().config).eval()
    tuned = tuned_copy(base)
    assert layout_of_model(base).architecture == "_TwoHeads"
    vector = TaskVector.from_finetuned(base, tuned)
    assert {"one.weight", "other.bias", "bert.pooler.dense.weight"} <= set(vector)
    with vector.applied_to(base):
        assert all(torch.equal(a, b) for a, b in zip(base.parameters(), tuned.parameters(), strict=True))


def _with_architectures(folder: Path, named: object, output: Path) -> Path:
    copied = shutil.copytree(folder, output)
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps({**config, "architectures": named}))
    return copied


def test_a_config_that_does_not_tell_its_class_is_refused(tmp_path: Path) -> None:
    CLASSES["ViTForImageClassification"].make().save_pretrained(tmp_path / "vit")
    with pytest.raises(UnsupportedError, match=r"type vit .* names no class in its architectures.*save_pretrained"):
        open_checkpoint(_with_architectures(tmp_path / "vit", None, tmp_path / "none"))
    for number, other in enumerate(("ViTForNobody", "BertModel", "AutoModel", "logging")):
        with pytest.raises(UnsupportedError, match=rf"type vit .* names {other}, which this transformers does not"):
            open_checkpoint(_with_architectures(tmp_path / "vit", [other], tmp_path / str(number)))


def test_a_model_of_several_others_is_none_of_them(tmp_path: Path) -> None:
    """MusicGen has a text model and a decoder, of which the decoder alone is a causal language model."""
    small = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 20}
    decoder = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "ffn_dim": 32, "vocab_size": 20}
    sound = {"model_type": "encodec", "num_filters": 2, "hidden_size": 8, "codebook_size": 8, "codebook_dim": 8}
    config = MusicgenConfig(text_encoder={"model_type": "t5", **small}, audio_encoder=sound, decoder=decoder)
    base = MusicgenForConditionalGeneration(config)
    pair = save_pair(tmp_path, base, tuned_copy(base))
    vector = pair.vector()
    assert {name.partition(".")[0] for name in vector} >= {"text_encoder", "audio_encoder", "decoder"}
    assert_gives_tuned(vector, pair)


def test_files_of_another_class_than_the_config_names_are_refused(tmp_path: Path) -> None:
    CLASSES["BertForSequenceClassification"].make().save_pretrained(tmp_path / "bert")
    wrong = _with_architectures(tmp_path / "bert", ["BertForQuestionAnswering"], tmp_path / "wrong")
    with pytest.raises(MismatchError, match=r"classifier.\S+.* not among the parameters of BertForQuestionAnswering"):
        open_checkpoint(wrong)


def test_what_a_class_never_saves_is_no_weight_of_its_live_models(tmp_path: Path) -> None:
    """Marian's positions are calculated: a file has none, so a live fine-tune of it has none either."""
    base = CLASSES["MarianMTModel"].make()
    pair = save_pair(tmp_path, base, tuned_copy(base))
    live = transformers.MarianMTModel.from_pretrained(pair.tuned)
    vector = TaskVector.from_finetuned(pair.base, live)
    assert_gives_tuned(vector, pair)
    assert not [name for name in live_checkpoint(live).tensors if "embed_positions" in name]
