"""Public names of a package that are imported when first used, so that importing the package costs nothing."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of a package.

    Args:
        package (`str`):
            Its `__name__`.
        homes (`Mapping[str, str]`):
            Each public name, and the module or subpackage below the package that has it.

    Example:
        >>> lazy_names("hf_taskvec", {"file_size": "sizes"})("file_size")(2000)
        '2 kB'

    """

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = import_module(f"{package}.{homes[name]}")
        return getattr(home, name) if hasattr(home, name) else import_module(f"{home.__name__}.{name}")

    return find
