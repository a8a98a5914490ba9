"""lm-evaluation-harness beside task vectors: the model type `taskvec`, known to it, and the folder of our tasks."""

from pathlib import Path

from hf_taskvec.evaluation.utility import check_lm_eval

#: what `--model` calls a model with a task vector on it
MODEL_TYPE = "taskvec"
_CLASS = "hf_taskvec.integrations.lm_eval_model:TaskVectorLM"


def register_lm_eval() -> None:
    """Make lm-eval know the model type `taskvec`, which it does not look for by itself.

    After it `lm_eval.simple_evaluate(model="taskvec", model_args="pretrained=…,vector=…,scale=-0.6", tasks=[…])` works.
    From a shell: `taskvec lm-eval run --model taskvec --model_args … --tasks …`.

    Raises:
        `UnsupportedError`: If lm-eval is not installed.

    Example:
        >>> register_lm_eval()

    """
    check_lm_eval()
    import lm_eval.models  # noqa: F401  (registers its own types)
    from lm_eval.api.registry import model_registry

    if MODEL_TYPE not in model_registry:
        model_registry.register(MODEL_TYPE, target=_CLASS)


def lm_eval_tasks_folder() -> Path:
    """The folder of our own tasks for lm-eval: books, MUSE and TOFU, for its `--include_path`.

    From a shell: `taskvec lm-eval --tasks-folder`.

    Returns:
        `Path`: It has a YAML for each task.

    Example:
        >>> (lm_eval_tasks_folder() / "book.yaml").is_file()
        True

    """
    return Path(__file__).parent / "lm_eval_yaml"
