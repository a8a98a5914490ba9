"""lm-evaluation-harness's model type `taskvec`: a causal language model with a task vector on it.

lm-eval keeps responses in a cache that knows the request alone, so two λ that share one report the same text. Here each
key of the cache also holds what the model is: its name, the vector and λ.
"""

from pathlib import Path
from typing import Any

from lm_eval.api.model import CacheHook
from lm_eval.models.huggingface import HFLM

from hf_taskvec.algebra.task_vector import TaskVector
from hf_taskvec.errors import BadValueError
from hf_taskvec.extraction.from_any import open_vector
from hf_taskvec.json_files import json_digest
from hf_taskvec.models.fingerprints import full_fingerprint


class TaskVectorLM(HFLM):
    """`pretrained + scale * vector`, for lm-eval: `--model taskvec --model_args pretrained=…,vector=…,scale=-0.6`.

    Args:
        pretrained (`str` or `PreTrainedModel`):
            As for lm-eval's type `hf`.
        vector (`str`, `Path` or `TaskVector`):
            A saved vector, an adapter or, with `base`, a full fine-tune: a folder or a Hub id.
        scale (`float`, *optional*, defaults to 1.0):
            λ.
        merge (`bool`, *optional*, defaults to `True`):
            Write into the weights. With `False` a low-rank vector is attached beside them, as quantised models need it.
        base (`str`, *optional*):
            What was fine-tuned, where `vector` is a full fine-tune.
        **options:
            All else that the type `hf` takes: `dtype`, `batch_size`, `device`, …

    Raises:
        `BadValueError`: If λ is no finite number.
        `MismatchError`: If the vector does not fit the model.

    Example:
        ```python
        lm = TaskVectorLM("me/books-model", vector="me/hp1-vector", scale=0.0)
        for scale in (0, -0.5, -1):
            lm.set_scale(scale)  # nothing is loaded again
            print(lm_eval.simple_evaluate(lm, tasks=["arc_easy"])["results"])
        ```

    """

    def __init__(
        self,
        pretrained: Any,
        vector: str | Path | TaskVector,
        scale: float = 1.0,
        merge: bool = True,
        base: str | None = None,
        **options: Any,
    ) -> None:
        if isinstance(scale, bool) or not isinstance(scale, int | float):
            raise BadValueError(f"scale={scale!r} is no number.")
        found = vector if isinstance(vector, TaskVector) else open_vector(str(vector), base)
        super().__init__(pretrained=pretrained, **options)
        # Of a live model no name tells what it is.
        self._base = pretrained if isinstance(pretrained, str) else full_fingerprint(self.model)
        self._edit = found.edit(self.model, float(scale), merge=bool(merge))

    @property
    def scale(self) -> float:
        """The present λ."""
        return self._edit.scale

    def set_scale(self, scale: float) -> None:
        """Move to another λ; the model is not loaded again.

        Args:
            scale (`float`):
                λ.
        """
        self._edit.set_scale(scale)

    def set_cache_hook(self, cache_hook: CacheHook) -> None:
        """Take part in a cache of responses, under keys of our own."""
        super().set_cache_hook(cache_hook)
        stored = cache_hook.dbdict
        if stored is not None:
            plain = stored.encode_key
            stored.encode_key = lambda key: plain(f"{self._identity()}:{key}")

    def _identity(self) -> str:
        """Tells this model at this λ from any other."""
        return json_digest(self._base, str(self.revision), self._edit.fingerprint, self.scale)

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval writes beside its results; the vector and λ are in it.

        Returns:
            `dict`: lm-eval's own entries, and `task_vector`, `task_vector_scale` and `task_vector_fingerprint`.
        """
        return super().get_model_info() | {
            "task_vector": self._edit.vector.expression,
            "task_vector_scale": self.scale,
            "task_vector_fingerprint": self._edit.fingerprint,
        }
