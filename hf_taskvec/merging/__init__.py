"""Many task vectors into one: the merging rules, and `combine`, which finds them by name.

```python
from hf_taskvec import combine, rules

merged = combine([hp1, hp2, pp], "ties", weights=[1.0, 1.0, -0.5], density=0.2)
```

A new rule is one function in one file; see `rule`.
"""

import hf_taskvec.merging.linear_rules
import hf_taskvec.merging.sparse_rules
import hf_taskvec.merging.spectral_rules  # noqa: F401 (each of the three registers its rules)
from hf_taskvec.merging.combining import combine
from hf_taskvec.merging.rules_by_name import Change, Parameter, Rule, rule, rules
from hf_taskvec.merging.scale_search import ScaleSearch, search_scale

__all__ = ["Change", "Parameter", "Rule", "ScaleSearch", "combine", "rule", "rules", "search_scale"]
