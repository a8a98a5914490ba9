"""mergekit's YAML, read strictly: what is not understood is refused by name, before any model is opened."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hf_taskvec.errors import BadValueError, CorruptFileError, MissingFileError, UnsupportedError, did_you_mean
from hf_taskvec.merging.mergekit_rule import MergekitMethod, check_settings, find_method
from hf_taskvec.yaml_files import parse_yaml

_TOP = (
    *("merge_method", "models", "slices", "base_model", "parameters"),
    *("dtype", "out_dtype", "tokenizer_source"),
)
# What mergekit knows besides, and what to do instead.
_UNSUPPORTED = {
    "modules": "models of several parts cannot be merged by parts. Use models: for the whole of them",
    "tokenizer": "tokens cannot be added or moved. Give models of one vocabulary, and tokenizer_source: base",
    "chat_template": "put the template into the output afterwards, as chat_template.jinja",
    "residual_weight": "leave it out",
    "override_architecture": "leave it out",
}


@dataclass(frozen=True)
class MergeSource:
    """A model in a merge: `model` as the YAML writes it, the layers that are taken, and its own parameters."""

    model: str
    layers: tuple[int, int] | None
    parameters: Mapping[str, Any]

    @property
    def weights(self) -> str:
        """The folder or Hub id of the model itself."""
        return self.model.partition("+")[0]

    @property
    def adapter(self) -> str | None:
        """The folder or Hub id of the adapter on it, if there is one."""
        return self.model.partition("+")[2] or None


@dataclass(frozen=True)
class MergeSlice:
    """What is merged to some of the output's layers; `models:` is one slice of all layers."""

    sources: tuple[MergeSource, ...]
    parameters: Mapping[str, Any]


@dataclass(frozen=True)
class MergekitConfig:
    """What a YAML of mergekit says.

    Args:
        method (`str`):
            The `merge_method`.
        slices (`tuple[MergeSlice, ...]`):
            What is merged to which layers.
        base_model (`str`, *optional*):
            The model that the others were fine-tuned from.
        parameters (`Mapping[str, Any]`):
            Those of the whole merge.
        dtype (`str`, *optional*):
            Of the result.
        tokenizer_source (`str`, *optional*):
            `"base"`, `"union"`, or a model.

    """

    method: str
    slices: tuple[MergeSlice, ...]
    base_model: str | None
    parameters: Mapping[str, Any]
    dtype: str | None
    tokenizer_source: str | None

    @property
    def kind(self) -> MergekitMethod:
        """The method itself."""
        return find_method(self.method)

    @property
    def models(self) -> list[str]:
        """Every model that is named, each once."""
        named = [source.model for each in self.slices for source in each.sources]
        return list(dict.fromkeys([*([self.base_model] if self.base_model else []), *named]))


def read_mergekit_config(
    config: "str | Path | Mapping[str, Any]", named: Mapping[str, str] | None = None
) -> MergekitConfig:
    """A YAML of mergekit, checked.

    Args:
        config (`str`, `Path` or `Mapping`):
            The file, or what it holds.
        named (`Mapping[str, str]`, *optional*):
            Folders or Hub ids of models that the YAML calls by other names.

    Returns:
        `MergekitConfig`: What it says. No model has been looked at.

    Raises:
        `MissingFileError`: If there is no such file.
        `CorruptFileError`: If it is no YAML.
        `MissingNameError`: If it has an option, a method or a parameter that there is not.
        `UnsupportedError`: If it has one that is not supported here.
        `BadValueError`: If a value makes no sense.

    """
    if isinstance(config, Mapping):
        found, where = dict(config), "the config"
    else:
        path = Path(config)
        if not path.is_file():
            raise MissingFileError(f"there is no file {path}. Give a YAML of mergekit.")
        try:
            text = path.read_text("utf-8")
        except UnicodeDecodeError as error:
            raise CorruptFileError(f"{path.name} is not UTF-8: {error}. Save it as UTF-8.") from None
        found, where = parse_yaml(text, path.name), path.name
    read = _config(found, where)
    if not named:
        return read
    slices = tuple(
        replace(each, sources=tuple(replace(one, model=named.get(one.model, one.model)) for one in each.sources))
        for each in read.slices
    )
    base = read.base_model
    return replace(read, slices=slices, base_model=base if base is None else named.get(base, base))


def _config(found: Any, where: str) -> MergekitConfig:
    _check_keys(found, _TOP, where)
    method = _text(found.get("merge_method"), f"{where}: merge_method")
    kind = find_method(method)
    listed = [each for each in ("models", "slices") if found.get(each)]
    if len(listed) != 1:
        raise BadValueError(f"{where} must have either models or slices, and has {' and '.join(listed) or 'neither'}.")
    parameters = _parameters(found, method, False, where)
    if listed == ["models"]:
        slices = [MergeSlice(_sources(found["models"], method, False, f"{where}: models"), {})]
    else:
        slices = [_slice(each, method, f"{where}: slices") for each in _list(found["slices"], f"{where}: slices")]
    base = None if found.get("base_model") is None else _text(found["base_model"], f"{where}: base_model")
    if base is None and kind.needs_base:
        raise BadValueError(f"{where}: {method} needs a base_model, the model that the others were fine-tuned from.")
    if base is not None and "+" in base:
        raise UnsupportedError(
            f"{where}: a base_model with an adapter on it is not supported. Write that model first: "
            f"taskvec apply {base.partition('+')[2]} {base.partition('+')[0]} -o BASE"
        )
    if base is not None and not kind.takes_base and any(base not in _models(each) for each in slices):
        raise BadValueError(
            f"{where}: {method} merges whole models, so the base_model has to be one of them. Leave it out, or list it."
        )
    dtypes = [_text(found[key], f"{where}: {key}") for key in ("out_dtype", "dtype") if found.get(key) is not None]
    source = found.get("tokenizer_source")
    return MergekitConfig(
        method,
        tuple(slices),
        base,
        parameters,
        dtypes[0] if dtypes else None,
        None if source is None else _text(source, f"{where}: tokenizer_source"),
    )


def _slice(found: Any, method: str, where: str) -> MergeSlice:
    _check_keys(found, ("sources", "parameters"), where)
    sources = _sources(found.get("sources"), method, True, f"{where}/sources")
    lengths = {stop - start for start, stop in (each.layers for each in sources if each.layers)}
    if len(lengths) != 1:
        raise BadValueError(f"{where}: the sources of a slice must have the same number of layers.")
    return MergeSlice(sources, _parameters(found, method, False, where))


def _sources(found: Any, method: str, with_layers: bool, where: str) -> tuple[MergeSource, ...]:
    made = []
    for each in _list(found, where):
        _check_keys(each, ("model", "parameters", *(["layer_range"] if with_layers else [])), where)
        model = _text(each.get("model"), f"{where}: model")
        if model.count("+") > 1:
            raise BadValueError(f"{where}: {model} has more than one adapter. Combine them first: taskvec combine.")
        parameters = _parameters(each, method, True, f"{where}: {model}")
        made.append(MergeSource(model, _layers(each, model, where) if with_layers else None, parameters))
    names = [each.model for each in made]
    if twice := [name for name in names if names.count(name) > 1]:
        raise BadValueError(f"{where}: {twice[0]} is there twice. List it once, with the sum of its weights.")
    return tuple(made)


def _layers(found: Mapping[str, Any], model: str, where: str) -> tuple[int, int]:
    given = found.get("layer_range")
    if not (isinstance(given, list | tuple) and len(given) == 2 and all(type(each) is int for each in given)):
        raise BadValueError(f"{where}: layer_range of {model} must be two whole numbers, not {given!r}.")
    start, stop = given
    if not 0 <= start < stop:
        raise BadValueError(f"{where}: layer_range of {model} is empty: {given}. The end is left out, as in Python.")
    return start, stop


def _parameters(found: Mapping[str, Any], method: str, of_model: bool, where: str) -> dict[str, Any]:
    given = found.get("parameters")
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise BadValueError(f"{where}: parameters must be names with values, not {given!r}.")
    check_settings(method, given, of_model, where)
    return dict(given)


def _models(each: MergeSlice) -> list[str]:
    return [source.model for source in each.sources]


def _check_keys(found: Any, known: tuple[str, ...], where: str) -> None:
    if not isinstance(found, Mapping):
        raise BadValueError(f"{where} must hold {', '.join(known)}, and is {str(found)[:60]!r}.")
    for key in found:
        if key in _UNSUPPORTED:
            raise UnsupportedError(f"{where}: {key} is not supported: {_UNSUPPORTED[key]}.")
        if key not in known:
            raise BadValueError(
                f"{where}: {str(key)[:60]!r} is no option there.{did_you_mean(str(key), known)} "
                f"There are {', '.join(known)}."
            )


def _list(found: Any, where: str) -> list[Any]:
    if not isinstance(found, list) or not found:
        raise BadValueError(f"{where} must be a list, and not an empty one.")
    return found


def _text(found: Any, where: str) -> str:
    if not isinstance(found, str) or not found.strip():
        raise BadValueError(f"{where} must be a text, not {found!r}.")
    return found.strip()
