"""What belongs to a model besides its weights."""

from pathlib import Path

from hf_taskvec.models.companions import companions


def test_configs_tokenizer_and_licence_belong_to_a_model_and_weights_and_records_do_not(tmp_path: Path) -> None:
    ours = ["LICENSE.txt", "additional_chat_templates/tool.jinja", "chat_template.jinja", "config.json", "merges.txt"]
    ours += ["modeling_mine.py", "tokenizer.json", "tokenizer.model"]
    others = [".hidden.json", "README.md", "adapter_config.json", "model.safetensors", "model.safetensors.index.json"]
    others += ["taskvec.json", "taskvec_apply.json", "trainer_state.json", "training.json", "optimizer.pt"]
    (tmp_path / "additional_chat_templates").mkdir()
    for name in (*ours, *others):
        (tmp_path / name).touch()
    assert [path.relative_to(tmp_path).as_posix() for path in companions(tmp_path)] == ours
