"""Many task vectors into one: the merging rules, and `combine`, which finds them by name.

```python
from hf_taskvec import combine, rules

merged = combine([hp1, hp2, pp], "ties", weights=[1.0, 1.0, -0.5], density=0.2)
```

A new rule is one function in one file; see `rule`.
"""

import sys
from types import ModuleType
from typing import Any

import hf_taskvec.combine.linear
import hf_taskvec.combine.sparse
import hf_taskvec.combine.spectral  # noqa: F401 (each of the three registers its rules)
from hf_taskvec.combine.combining import combine
from hf_taskvec.combine.registry import Change, Parameter, Rule, rule, rules
from hf_taskvec.combine.search import ScaleSearch, search_scale

__all__ = ["Change", "Parameter", "Rule", "ScaleSearch", "combine", "rule", "rules", "search_scale"]


class _Callable(ModuleType):
    """Once this package is imported, Python makes `hf_taskvec.combine` mean the package, and no longer the function of
    that name. So the package can be called as well."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return combine(*arguments, **options)


sys.modules[__name__].__class__ = _Callable
