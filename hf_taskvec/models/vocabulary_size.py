"""Where a model's config says how many tokens its vocabulary has."""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from hf_taskvec.errors import UnsupportedError
from hf_taskvec.models.layout import Layout, layout_of_config
from hf_taskvec.models.meta_models import build_meta_model, most_parameters


def grown_config(
    config: Mapping[str, Any], old: int, new: int, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Any]:
    """The config of the same model with a larger vocabulary.

    Args:
        config (`Mapping[str, Any]`):
            What `config.json` holds.
        old (`int`):
            The number of rows that the model's embedding has.
        new (`int`):
            The number that it gets.
        shapes (`Mapping[str, tuple[int, ...]]`):
            The shape of each parameter then, by canonical names: what the new config must describe.

    Returns:
        `dict[str, Any]`: The new config, which transformers builds with those shapes.

    Raises:
        `UnsupportedError`: If no number in the config can say so.

    """
    layout = layout_of_config(config)
    wrong = ""
    for places in _candidates(config, old, layout):
        grown = copy.deepcopy(dict(config))
        for *path, key in places:
            inside = grown
            for each in path:
                inside = inside.setdefault(each, {})
            inside[key] = new
        described = layout_of_config(grown).shapes
        if described == dict(shapes) or not layout.shapes:
            return grown
        wrong = next(name for name in {**shapes, **described} if described.get(name) != shapes.get(name))
    raise UnsupportedError(
        f"the vocabulary would grow from {old} to {new} rows, and the config of {layout.architecture or 'the base'} "
        f"cannot say so{f' ({wrong} would not fit it)' if wrong else ''}. Extract the vector with "
        "vocabulary='truncate'."
    )


def _candidates(config: Mapping[str, Any], old: int, layout: Layout) -> Iterator[list[tuple[str, ...]]]:
    """The places of the number, as transformers itself knows it; else wherever a vocabulary of that size is named."""
    if layout.shapes:
        typed = build_meta_model(config, most_parameters(config, None)).config
        try:
            text = typed.get_text_config()
        except ValueError:  # several of them
            pass
        else:
            key = text.attribute_map.get("vocab_size", "vocab_size")
            yield [(*(_path_to(typed, text) or ()), key)]
    if named := list(_named(config, old)):
        yield named


def _path_to(config: Any, inner: Any) -> tuple[str, ...] | None:
    """The keys that lead from a config to one inside it."""
    if inner is config:
        return ()
    for key in getattr(config, "sub_configs", ()):
        path = _path_to(getattr(config, key), inner)
        if path is not None:
            return (key, *path)
    return None


def _named(config: Mapping[str, Any], old: int) -> Iterator[tuple[str, ...]]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from ((key, *path) for path in _named(value, old))
        elif key.endswith("vocab_size") and value == old:
            yield (key,)
