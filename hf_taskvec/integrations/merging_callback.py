"""`MergeModelCallback`, in the place of TRL's: the model that is trained merged with another one, without mergekit."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_taskvec.algebra.task_vector import TaskVector
from hf_taskvec.application.to_checkpoint import apply
from hf_taskvec.distributed import processes
from hf_taskvec.errors import BadValueError, MissingFileError, TaskVectorWarning, did_you_mean
from hf_taskvec.filenames import ADAPTER_CONFIG
from hf_taskvec.integrations.mergekit_config import MergekitConfig, read_mergekit_config
from hf_taskvec.integrations.mergekit_merge import open_merge

_METHODS = ("linear", "ties", "dare_ties", "slerp")
# What a YAML calls the two models.
_POLICY, _TARGET = "policy", "target"


@dataclass
class MergeConfig:
    """How the trained model (the policy) is merged with another one (the target): TRL's options by TRL's names.

    Args:
        method (`str`, *optional*, defaults to `"linear"`):
            `"linear"`, `"ties"`, `"dare_ties"` or `"slerp"`.
        target_model_path (`str`, *optional*):
            A folder or a Hub id; by default the model that training started from.
        policy_model_weight (`float`, *optional*):
            0.5 for `linear`, else 1.
        target_model_weight (`float`, *optional*):
            0.5 for `linear`, else 1.
        policy_model_density (`list[float]`, *optional*):
            For `ties` and `dare_ties`, over the layers; `[1.0, 0.7, 0.1]` by default.
        target_model_density (`list[float]`, *optional*):
            The same of the target; `[1.0]` by default.
        normalize (`bool`, *optional*, defaults to `True`):
            For `ties` and `dare_ties`.
        t_values (`float` or `list[float]`, *optional*, defaults to 0.5):
            For `slerp`: from 0, the policy, to 1, the target.
        dtype (`str`, *optional*):
            Of the result; by default that of the checkpoint (TRL's is float16).

    """

    method: str = "linear"
    target_model_path: str | None = None
    policy_model_weight: float | None = None
    target_model_weight: float | None = None
    policy_model_density: Any = None
    target_model_density: Any = None
    normalize: Any = True
    t_values: Any = 0.5
    dtype: str | None = None

    def __post_init__(self) -> None:
        if self.method not in _METHODS:
            raise BadValueError(
                f"method={self.method!r} is none of {', '.join(_METHODS)}.{did_you_mean(str(self.method), _METHODS)} "
                "For other methods give a YAML of mergekit, in which the models are called policy and target."
            )

    def create(self) -> dict[str, Any]:
        """The same as mergekit's YAML says it, with the models called `policy` and `target`."""
        common: dict[str, Any] = {"merge_method": self.method, **({"dtype": self.dtype} if self.dtype else {})}
        if self.method == "slerp":
            return {**common, "base_model": _POLICY, "models": [{"model": _TARGET}], "parameters": {"t": self.t_values}}
        default = 0.5 if self.method == "linear" else 1.0
        policy: dict[str, Any] = {"weight": default if self.policy_model_weight is None else self.policy_model_weight}
        target: dict[str, Any] = {"weight": default if self.target_model_weight is None else self.target_model_weight}
        if self.method == "linear":
            models = [{"model": _POLICY, "parameters": policy}, {"model": _TARGET, "parameters": target}]
            return {**common, "models": models}
        policy |= {"density": [1.0, 0.7, 0.1] if self.policy_model_density is None else self.policy_model_density}
        target |= {"density": [1.0] if self.target_model_density is None else self.target_model_density}
        models = [{"model": _TARGET, "parameters": target}, {"model": _POLICY, "parameters": policy}]
        return {**common, "base_model": _POLICY, "models": models, "parameters": {"normalize": bool(self.normalize)}}


class MergeModelCallback(TrainerCallback):
    """Merges the model that is trained with another one, at the end of training or at each checkpoint.

    Takes the place of TRL's `MergeModelCallback`, in `Trainer` and in every trainer of TRL's, and needs no mergekit.
    The merged model is in `checkpoint-N/merged`, streamed, and whole or not there; all processes write it together.
    Where an adapter is trained, the policy is its base with the adapter on it.

    Args:
        merge_config (`MergeConfig`, `str`, `Path` or `Mapping`, *optional*):
            How; or a YAML of mergekit (the file, or what it holds), in which the models `policy` and `target` are the
            checkpoint and the model that training started from.
        merge_at_every_checkpoint (`bool`, *optional*, defaults to `False`):
            Merge each checkpoint, not the last one alone.
        after (`Callable`, *optional*):
            Gets the folder of each merged model, on the main process, and may push it, for example.

    Raises:
        `BadValueError`: When training begins, if no checkpoints are saved, or it is not known what it started from.

    Example:
        >>> from hf_taskvec.integrations import MergeConfig, MergeModelCallback
        >>> callback = MergeModelCallback(MergeConfig("ties"))
        >>> trainer = SFTTrainer(model, args, train_dataset=data, callbacks=[callback])  # doctest: +SKIP

    """

    def __init__(
        self,
        merge_config: MergeConfig | str | Path | Mapping[str, Any] | None = None,
        merge_at_every_checkpoint: bool = False,
        *,
        after: Callable[[Path], object] | None = None,
    ) -> None:
        self.merge_config = MergeConfig() if merge_config is None else merge_config
        self.merge_at_every_checkpoint, self.after = merge_at_every_checkpoint, after
        self._read()  # what makes no sense is refused before training

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Refuse what could not be merged in the end."""
        strategy = str(getattr(args.save_strategy, "value", args.save_strategy))
        if strategy in ("no", "best"):
            raise BadValueError(
                f"save_strategy={strategy!r} leaves no checkpoint of the last step to merge. Set "
                "save_strategy='epoch' or 'steps'."
            )
        self._target(kwargs["model"])

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Merge the checkpoint that was saved."""
        if self.merge_at_every_checkpoint:
            self._merge(args, state, kwargs["model"])

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Merge the last checkpoint."""
        if not self.merge_at_every_checkpoint:
            self._merge(args, state, kwargs["model"])

    def _merge(self, args: TrainingArguments, state: TrainerState, model: Any) -> None:
        group = processes()
        group.wait_for_everyone()  # for the main process, which writes the checkpoint
        checkpoint = Path(args.output_dir or ".") / f"checkpoint-{state.global_step}"
        if not checkpoint.is_dir():
            raise MissingFileError(f"there is no {checkpoint.name} in {checkpoint.parent.name} to merge.")
        target, policy = self._target(model), checkpoint
        if (checkpoint / ADAPTER_CONFIG).exists():
            policy = checkpoint / _POLICY
            base = str(getattr(model.config, "_name_or_path", None) or target)
            apply(TaskVector.from_adapter(checkpoint, base=base), base, policy, overwrite=True, progress=False)
        config = self._read({_POLICY: str(policy), _TARGET: target})
        with warnings.catch_warnings():
            # TRL's own configs take the policy for the base, which was made from the target.
            warnings.simplefilter("ignore", TaskVectorWarning)
            merge = open_merge(config)
        merged = merge.apply(checkpoint / "merged", overwrite=True, progress=False)
        if self.after is not None and state.is_world_process_zero:
            self.after(merged)

    def _read(self, named: Mapping[str, str] | None = None) -> MergekitConfig:
        """The config, with the models of these names."""
        given = self.merge_config
        return read_mergekit_config(given.create() if isinstance(given, MergeConfig) else given, named or {})

    def _target(self, model: Any) -> str:
        if isinstance(self.merge_config, MergeConfig) and self.merge_config.target_model_path is not None:
            return self.merge_config.target_model_path
        found = getattr(model.config, "_name_or_path", "")
        if not found:
            raise BadValueError(
                "the model does not tell what it was loaded from. Name the model to merge with: "
                "MergeConfig(target_model_path=...), or its path in the YAML."
            )
        return str(found)
