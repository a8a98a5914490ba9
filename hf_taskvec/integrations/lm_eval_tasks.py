"""lm-evaluation-harness beside task vectors: the model type `taskvec`, and its tasks as a metric for any λ."""

from collections.abc import Callable, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any

from hf_taskvec.errors import BadValueError, UnsupportedError

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

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
    try:
        import lm_eval.models  # noqa: F401  (registers its own types)
        from lm_eval.api.registry import model_registry
    except ImportError:
        raise UnsupportedError("this needs lm-evaluation-harness: pip install 'hf-taskvec[lm-eval]'") from None
    if MODEL_TYPE not in model_registry:
        model_registry.register(MODEL_TYPE, target=_CLASS)


def lm_eval_metric(
    tasks: Sequence[str],
    tokenizer: Any = None,
    *,
    limit: int | float | None = None,
    batch_size: int | str = 8,
    task_manager: "TaskManager | None" = None,
    **options: Any,
) -> Callable[[Any], dict[str, float]]:
    """lm-eval's tasks as a metric for `score_scales`: what an edit costs in abilities that no book measures.

    Args:
        tasks (`Sequence[str]`):
            Names of lm-eval's tasks, such as `"arc_easy"` and `"lambada_openai"`.
        tokenizer (`PreTrainedTokenizerBase` or `str`, *optional*):
            The model's; by default it is found by the model's own name.
        limit (`int` or `float`, *optional*):
            So many documents of each task, or such a share of them.
        batch_size (`int` or `str`, *optional*, defaults to 8):
            As in lm-eval.
        task_manager (`lm_eval.tasks.TaskManager`, *optional*):
            Where tasks of your own are found.
        **options:
            More of `lm_eval.simple_evaluate`, such as `num_fewshot`.

    Returns:
        `Callable`: From a live model to `{"arc_easy/acc": 0.61, …}`: each task's metrics, without their errors.

    Raises:
        `UnsupportedError`: If lm-eval is not installed.
        `BadValueError`: If no task is named.

    Example:
        ```python
        found = score_scales(model, vector, [0, -0.5, -1], lm_eval_metric(["arc_easy"], tokenizer, limit=200))
        found.of("arc_easy/acc")
        ```

    """
    register_lm_eval()
    if not tasks or isinstance(tasks, str):
        raise BadValueError(f"tasks={tasks!r}: give a list of names of lm-eval's tasks.")
    import lm_eval
    from lm_eval.models.huggingface import HFLM

    def metric(model: Any) -> dict[str, float]:
        lm = HFLM(model, tokenizer=tokenizer, batch_size=batch_size)
        quietly = {"log_samples": False, "bootstrap_iters": 0, **options}
        found = lm_eval.simple_evaluate(lm, tasks=list(tasks), limit=limit, task_manager=task_manager, **quietly)
        if found is None:
            raise UnsupportedError("lm-eval gives results in the main process alone: score λ in one process.")
        return {
            f"{task}/{name.removesuffix(',none')}": float(value)
            for task, values in found["results"].items()
            for name, value in values.items()
            if isinstance(value, Real) and not isinstance(value, bool) and "_stderr" not in name and "," in name
        }

    return metric
