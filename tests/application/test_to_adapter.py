"""A vector exported as a PEFT adapter: loaded and merged by PEFT, it is the vector."""

import json

import pytest
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from support import tiny_models
from support.tiny_models import low_rank
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from hf_taskvec import TaskVector
from hf_taskvec.application.peft_loading import target_modules
from hf_taskvec.errors import BadValueError, MismatchError, MissingFileError, OutputError, UnsupportedError


def merged_by_peft(base, folder):
    model = AutoModelForCausalLM.from_pretrained(base)
    return PeftModel.from_pretrained(model, folder).merge_and_unload()


@pytest.mark.parametrize("architecture", tiny_models.DENSE)
def test_an_adapter_merged_by_peft_is_the_streamed_result(models, tmp_path, architecture):
    pair = models.pair(architecture)
    vector = low_rank(AutoModelForCausalLM.from_pretrained(pair.base), exclude="(norm|ln_|bias|wpe|embed|wte|lm_head)")
    expression = -0.6 * vector + 0.25 * vector.filter(include="*0*").named("part")
    expression.to_adapter(tmp_path / "adapter", base_model_name_or_path=str(pair.base))
    found = merged_by_peft(pair.base, tmp_path / "adapter")
    expected = AutoModelForCausalLM.from_pretrained(expression.apply(pair.base, tmp_path / "out"))
    for (name, a), b in zip(found.named_parameters(), expected.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6, rtol=1e-6), name
    assert torch.equal(
        found.generate(torch.tensor([[1, 2]]), max_new_tokens=3),
        expected.generate(torch.tensor([[1, 2]]), max_new_tokens=3),
    )


def test_ranks_may_differ_or_be_padded_to_one(models, tmp_path):
    pair = models.pair("phi")
    model = AutoModelForCausalLM.from_pretrained(pair.base)
    every = low_rank(model, exclude="(norm|bias|embed|lm_head)")
    vector = every + low_rank(model, rank=2, exclude="(norm|bias|embed|lm_head|layers.0|fc1)").named("more")
    expected = AutoModelForCausalLM.from_pretrained(vector.apply(pair.base, tmp_path / "out"))
    for uniform in (False, True):
        folder = vector.to_adapter(tmp_path / f"adapter{uniform}", str(pair.base), uniform_rank=uniform)
        config = json.loads((folder / "adapter_config.json").read_text())
        assert bool(config["rank_pattern"]) is not uniform
        assert not config["use_rslora"]
        assert config["target_modules"] == ["dense", "fc1", "fc2", "k_proj", "q_proj", "v_proj"]
        for a, b in zip(merged_by_peft(pair.base, folder).parameters(), expected.parameters(), strict=True):
            assert torch.allclose(a, b, atol=1e-6)


def test_an_adapter_comes_back_as_the_same_vector(models, tmp_path):
    pair = models.pair("gpt2")
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(pair.base),
        LoraConfig(
            r=4,
            lora_alpha=7,
            use_rslora=True,
            target_modules=["c_attn", "c_proj"],
            fan_in_fan_out=True,
            init_lora_weights=False,
        ),
    )
    vector = TaskVector.from_adapter(model)
    vector.to_adapter(tmp_path / "adapter", str(pair.base))
    again = TaskVector.from_adapter(tmp_path / "adapter")
    assert set(again) == set(vector)
    assert (again - vector).norm() < 1e-6 * vector.norm()
    compressed = (vector - 0.5 * vector.filter(include="*c_attn*").named("part")).compress(rank=2)
    compressed.to_adapter(tmp_path / "small", str(pair.base))
    assert (TaskVector.from_adapter(tmp_path / "small") - compressed).norm() < 1e-6 * compressed.norm()


def test_embeddings_and_heads_are_exported(models, tmp_path):
    pair = models.pair("phi")
    vector = low_rank(AutoModelForCausalLM.from_pretrained(pair.base)).filter(include=["*embed_tokens*", "lm_head*"])
    folder = vector.to_adapter(tmp_path / "adapter", str(pair.base))
    expected = AutoModelForCausalLM.from_pretrained(vector.apply(pair.base, tmp_path / "out"))
    for a, b in zip(merged_by_peft(pair.base, folder).parameters(), expected.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def test_dense_parts_are_refused_saved_or_dropped(models, tmp_path):
    pair = models.pair("phi")
    matrices = low_rank(AutoModelForCausalLM.from_pretrained(pair.base), exclude="(norm|bias|embed|lm_head)")
    rest = pair.vector().filter(include=["*norm*", "*embed*", "*q_proj.bias", "lm_head*"])
    vector = matrices + rest
    with pytest.raises(UnsupportedError, match=r"(?s)are not low-rank.*dense='drop'.*dense='save'"):
        vector.to_adapter(tmp_path / "adapter", str(pair.base))
    assert not (tmp_path / "adapter").exists()
    vector.to_adapter(tmp_path / "saved", str(pair.base), dense="save")
    expected = AutoModelForCausalLM.from_pretrained(vector.apply(pair.base, tmp_path / "out"))
    found = merged_by_peft(pair.base, tmp_path / "saved")
    for (name, a), b in zip(found.named_parameters(), expected.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6), name
    vector.to_adapter(tmp_path / "dropped", str(pair.base), dense="drop")
    assert set(TaskVector.from_adapter(tmp_path / "dropped")) == set(matrices)


def test_what_cannot_be_exported_is_refused(models, tmp_path):
    pair = models.pair("phi")
    with pytest.raises(UnsupportedError, match="compress"):
        pair.vector().to_adapter(tmp_path / "adapter", dense="drop")
    vector = low_rank(AutoModelForCausalLM.from_pretrained(pair.base))
    with pytest.raises(BadValueError, match="dense='keep' is not one of"):
        vector.to_adapter(tmp_path / "adapter", dense="keep")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("precious")
    with pytest.raises(OutputError, match="holds other files"):
        vector.filter(exclude="*embed*").to_adapter(tmp_path / "mine", overwrite=True)
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(pair.base), LoraConfig(r=2, target_modules=["q_proj"], use_dora=True)
    )
    dora = TaskVector.from_adapter(tiny_models.shake(model, 0.1))
    with pytest.raises(UnsupportedError, match="not low-rank"):
        dora.to_adapter(tmp_path / "dora")
    dora.compress(rank=4).to_adapter(tmp_path / "dora")
    assert len(TaskVector.from_adapter(tmp_path / "dora")) == 2


def test_embeddings_are_told_by_the_model_not_by_their_names(models, tmp_path):
    pair = models.pair("opt", tie_word_embeddings=False)
    vector = low_rank(AutoModelForCausalLM.from_pretrained(pair.base), exclude="(norm|bias)")
    with pytest.raises(UnsupportedError, match=r"(?s)embed_positions\.weight is of .* cannot run.*filter\(exclude"):
        vector.to_adapter(tmp_path / "adapter", str(pair.base))
    rest = vector.filter(exclude="*embed_positions*")
    folder = rest.to_adapter(tmp_path / "adapter", str(pair.base))
    assert "model.decoder.embed_tokens.weight" in rest
    assert (TaskVector.from_adapter(folder) - rest).norm() < 1e-6 * rest.norm()
    pair = models.pair("gpt2", tie_word_embeddings=False)
    vector = low_rank(AutoModelForCausalLM.from_pretrained(pair.base), exclude="(ln_|bias)").filter(include="*wpe*")
    folder = vector.to_adapter(tmp_path / "positions", str(pair.base))
    expected = AutoModelForCausalLM.from_pretrained(vector.apply(pair.base, tmp_path / "out"))
    for a, b in zip(merged_by_peft(pair.base, folder).parameters(), expected.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6)


@pytest.mark.parametrize("name", ["transformer.wte.weight", "transformer.h.0.attn.c_proj.weight"])
def test_what_depends_on_an_unknown_base_is_refused(tmp_path, name):
    vector = TaskVector.from_tensors({name: (torch.ones(4, 1), torch.ones(1, 4))})
    with pytest.raises(MissingFileError, match=r"depends on the base's architecture.*Pass base="):
        vector.to_adapter(tmp_path / "adapter")


def test_a_tied_embedding_is_refused(models, tmp_path):
    pair = models.pair("gpt2")
    matrices = low_rank(AutoModelForCausalLM.from_pretrained(pair.base), exclude="(ln_|bias|wte|wpe)")
    dense = matrices + pair.vector().filter(include="*wte*")
    for vector, option in ((dense.compress(rank=2), "refuse"), (dense, "save")):
        with pytest.raises(UnsupportedError, match=r"(?s)wte\.weight is also lm_head\.weight of .*filter\(exclude"):
            vector.to_adapter(tmp_path / "adapter", str(pair.base), dense=option)
    dense.to_adapter(tmp_path / "adapter", str(pair.base), dense="drop")
    assert set(TaskVector.from_adapter(tmp_path / "adapter")) == set(matrices)


def test_a_base_that_does_not_fit_is_refused(models, tmp_path):
    pair = models.pair("phi")
    vector = pair.vector().filter(include=["*_proj.weight", "*fc1.weight"]).compress(rank=2)
    with pytest.raises(MismatchError, match=r"made for PhiForCausalLM; base is GPT2LMHeadModel: 0 of 8 names match"):
        vector.to_adapter(tmp_path / "adapter", base=models.pair("gpt2").base)
    larger = models.pair("phi", intermediate_size=48)
    with pytest.raises(MismatchError, match=r"fc1\.weight: the model has shape .* models of different sizes"):
        vector.to_adapter(tmp_path / "adapter", str(larger.base))
    dense = vector + pair.vector().filter(include="*fc1.bias")
    with pytest.raises(MismatchError, match="models of different sizes"):
        dense.to_adapter(tmp_path / "adapter", str(larger.base), dense="drop")
    assert not (tmp_path / "adapter").exists()


def test_a_change_of_a_tied_head_alone_fits(models, tmp_path):
    pair = models.pair("gpt2")
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(pair.base),
        LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False),
    )
    vector = TaskVector.from_adapter(model)
    again = TaskVector.from_adapter(vector.to_adapter(tmp_path / "adapter", str(pair.base)))
    assert set(vector) == set(again) == {"lm_head.weight"}
    assert (again - vector).norm() < 1e-6 * vector.norm()


CTRL = {"n_embd": 16, "n_layer": 2, "n_head": 2, "dff": 32, "n_positions": 32, "vocab_size": 20}


def test_a_number_is_no_target_where_it_names_other_layers(tmp_path):
    """CTRL's feed-forward layers are called 0 and 2, as its blocks are; PEFT takes no block."""
    AutoModelForCausalLM.from_config(CONFIG_MAPPING["ctrl"](**CTRL)).save_pretrained(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    vector = low_rank(model, exclude="(norm|bias|transformer.w|lm_head)")
    folder = vector.to_adapter(tmp_path / "adapter", str(tmp_path / "base"))
    targets = json.loads((folder / "adapter_config.json").read_text())["target_modules"]
    assert "transformer.h.0.ffn.0" in targets
    expected = AutoModelForCausalLM.from_pretrained(vector.apply(tmp_path / "base", tmp_path / "out"))
    for a, b in zip(merged_by_peft(tmp_path / "base", folder).parameters(), expected.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def test_paths_that_others_end_in_are_told_apart():
    """A list of names means every module whose path ends in one of them."""
    inner = torch.nn.ModuleDict({"q": torch.nn.Linear(2, 2), "k": torch.nn.Linear(2, 2)})
    model = torch.nn.ModuleDict({"q": torch.nn.Linear(2, 2), "k": torch.nn.Linear(2, 2), "inner": inner})
    assert target_modules(model, ["q", "inner.q"]) == ["q"]
    assert target_modules(model, ["inner.q"]) == ["inner.q"]
    alone = target_modules(model, ["q"])
    wrapped = get_peft_model(model, LoraConfig(target_modules=alone))
    assert [path for path, _ in wrapped.named_modules() if path.endswith("lora_A")] == ["base_model.model.q.lora_A"]


def test_layers_that_peft_does_not_take_are_named_before_anything_is_written(models, tmp_path):
    """Qwen2-MoE's router is no layer that PEFT knows; Llama 4's is one by its class, and gives a tuple."""
    small = {"num_experts_per_tok": 1, "shared_expert_intermediate_size": 8, "intermediate_size_mlp": 32}
    for architecture, router in (("qwen2_moe", r"mlp\.gate\.weight"), ("llama4_text", r"router\.weight")):
        folder = models.pair(architecture, **small).base
        model = AutoModelForCausalLM.from_pretrained(folder)
        vector = low_rank(model, exclude="(norm|bias|experts|embed|lm_head|_proj)")
        with pytest.raises(
            UnsupportedError, match=rf"(?s)(cannot load.*{router}|{router} are of .* cannot run).*exclude="
        ):
            vector.to_adapter(tmp_path / "adapter", str(folder))
        assert not list(tmp_path.glob("*adapter*"))


@pytest.mark.parametrize("architecture", tiny_models.EXPERTS)
@pytest.mark.filterwarnings("ignore::RuntimeWarning:peft")
def test_experts_are_exported_where_peft_loads_them(models, tmp_path, architecture):
    pair = models.pair(architecture)
    vector = pair.vector().filter(include=["*experts*", "*_proj.weight"]).compress(rank=2)
    if architecture == "phimoe":
        with pytest.raises(UnsupportedError, match=r"PEFT would not load.*experts\.0\.w1\.weight.*filter\(exclude"):
            vector.to_adapter(tmp_path / "adapter", str(pair.base))
        vector = vector.filter(exclude="*experts*")
    folder = vector.to_adapter(tmp_path / "adapter", str(pair.base))
    expected = AutoModelForCausalLM.from_pretrained(vector.apply(pair.base, tmp_path / "out"))
    for a, b in zip(merged_by_peft(pair.base, folder).parameters(), expected.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def named_base(folder):
    return json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]


def test_the_base_is_named_so_that_peft_finds_it(models, hub, tmp_path):
    pair = models.pair("phi")
    commit = hub.add_repo("me/base", pair.base)
    hub.add_repo("me/tuned", pair.tuned)
    matrices = {"include": "*_proj.weight"}
    vector = TaskVector.from_finetuned("me/base", "me/tuned").filter(**matrices).compress(rank=2)
    for number, given in enumerate(({}, {"base": pair.base})):
        folder = vector.to_adapter(tmp_path / f"hub{number}", **given)
        config = json.loads((folder / "adapter_config.json").read_text())
        assert (config["base_model_name_or_path"], config["revision"]) == ("me/base", commit)
    local = pair.vector().filter(**matrices).compress(rank=2)
    of_adapter = TaskVector.from_adapter(local.to_adapter(tmp_path / "local"))
    for number, each in enumerate((local, of_adapter, local + of_adapter.named("other"))):
        folder = each.to_adapter(tmp_path / f"local{number}")
        assert named_base(folder) == str(pair.base.resolve())
        loaded = AutoPeftModelForCausalLM.from_pretrained(folder)
        assert type(loaded.get_base_model()).__name__ == "PhiForCausalLM"
        assert str(tmp_path) not in (folder / "taskvec_adapter.json").read_text()
    vector.save(tmp_path / "saved")
    assert named_base(TaskVector.load(tmp_path / "saved").to_adapter(tmp_path / "again")) == "me/base"
    local.save(tmp_path / "saved-local")  # holds no path of this machine
    assert named_base(TaskVector.load(tmp_path / "saved-local").to_adapter(tmp_path / "none")) is None
    given = TaskVector.load(tmp_path / "saved-local").to_adapter(tmp_path / "given", base=pair.base)
    assert named_base(given) == str(pair.base.resolve())


def test_a_live_base_is_not_named(models, tmp_path):
    pair = models.pair("phi")
    live = [AutoModelForCausalLM.from_pretrained(folder) for folder in (pair.base, pair.tuned)]
    vector = TaskVector.from_finetuned(*live).filter(include="*_proj.weight").compress(rank=2)
    assert named_base(vector.to_adapter(tmp_path / "adapter")) is None
    wrapped = get_peft_model(live[0], LoraConfig(r=2, target_modules=["q_proj"], use_dora=True))
    dora = TaskVector.from_adapter(tiny_models.shake(wrapped, 0.1)).compress(rank=4)
    assert named_base(dora.to_adapter(tmp_path / "dora")) == str(pair.base.resolve())  # as PEFT's own config does


def test_a_base_that_was_given_must_be_there(models, hub, tmp_path):
    vector = models.pair("phi").vector().filter(include="*_proj.weight").compress(rank=2)
    for given in ({"base": tmp_path / "gone"}, {"base": "me/gone"}, {"base_model_name_or_path": "me/gone"}):
        with pytest.raises(MissingFileError, match="gone"):
            vector.to_adapter(tmp_path / "adapter", **given)
    folder = vector.to_adapter(tmp_path / "adapter", "me/gone", base=models.pair("phi").base)
    assert named_base(folder) == "me/gone"
    base = models.pair("phi").base  # a Path
    assert named_base(vector.to_adapter(tmp_path / "path", base)) == str(base)


def test_only_an_export_is_overwritten(tmp_path):
    vector = TaskVector.from_tensors({"model.q_proj.weight": (torch.ones(4, 1), torch.ones(1, 4))}, name="v")
    folder = (0.5 * vector).to_adapter(tmp_path / "ours")
    assert json.loads((folder / "taskvec_adapter.json").read_text())["expression"] == "0.5*v"
    vector.to_adapter(folder, overwrite=True)
    assert json.loads((folder / "taskvec_adapter.json").read_text())["expression"] == "v"
    theirs = tmp_path / "theirs"
    (theirs / "checkpoint-10").mkdir(parents=True)
    (theirs / "adapter_config.json").write_text("{}")
    with pytest.raises(OutputError, match="holds other files"):
        vector.to_adapter(theirs, overwrite=True)
    assert (theirs / "checkpoint-10").exists()


@pytest.mark.filterwarnings("ignore")  # Mamba says that it has no kernels here
def test_a_weight_that_is_used_without_its_layer_is_refused_by_name(tmp_path):
    """PEFT adds a LoRA in the layer's forward: unmerged, such a weight would go without."""
    config = CONFIG_MAPPING["falcon_mamba"](hidden_size=16, state_size=4, num_hidden_layers=1, vocab_size=32)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path / "base")
    vector = low_rank(model).filter(include=["*dt_proj*", "*in_proj*", "*x_proj*"])
    with pytest.raises(UnsupportedError, match=r"dt_proj\.weight is used by FalconMambaForCausalLM without calling"):
        vector.to_adapter(tmp_path / "adapter", base=tmp_path / "base")
    folder = vector.filter(exclude="*dt_proj*").to_adapter(tmp_path / "adapter", base=tmp_path / "base")
    tokens = torch.tensor([[1, 2, 3]])
    with vector.filter(exclude="*dt_proj*").applied_to(model), torch.no_grad():
        expected = model(tokens).logits
    with torch.no_grad():
        assert torch.allclose(PeftModel.from_pretrained(model, folder)(tokens).logits, expected, atol=1e-5)
