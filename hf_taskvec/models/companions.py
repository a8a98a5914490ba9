"""What belongs to a model besides its weights: configs, tokenizer, chat template, code, licence."""

from pathlib import Path

from hf_taskvec.filenames import ADAPTER_CONFIG, TRAINING_RECORD

#: patterns of such files. A model's card is not among them: that of a changed model differs.
COMPANIONS = (
    *("*.json", "*.model", "*.model.v*", "*.tiktoken", "vocab*.txt", "merges.txt", "dict.txt", "bpe.codes"),
    *("*.jinja", "additional_chat_templates/*", "*.py"),
    *("LICENSE*", "LICENCE*", "NOTICE*"),  # licences ask that they stay with the weights
)
_NOT_COMPANIONS = ("*.index.json", ADAPTER_CONFIG, "trainer_state.json", TRAINING_RECORD, "taskvec*.json", ".*")


def companions(folder: Path) -> list[Path]:
    """The files of a model folder beside its weights: config, tokenizer, code."""
    found = {path for pattern in COMPANIONS for path in folder.glob(pattern) if path.is_file()}
    return sorted(path for path in found if not any(path.match(pattern) for pattern in _NOT_COMPANIONS))
