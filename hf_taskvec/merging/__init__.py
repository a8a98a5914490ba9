"""Many task vectors into one: the merging rules, and `combine`, which finds them by name.

```python
from hf_taskvec import combine, rules

merged = combine([hp1, hp2, pp], "ties", weights=[1.0, 1.0, -0.5], density=0.2)
```

- `combining`: `combine`, and what it checks about the vectors first
- `linear_rules`: the rules `sum`, `mean`, `weighted`, `interpolate`, `layers` and `learned`
- `sparse_rules`: the rules `magnitude`, `rows`, `breadcrumbs`, `dare`, `ties` and `negmerge`
- `angle_rules`: the rules `slerp` and `model_stock`
- `elected_rules`: the rules `breadcrumbs_ties`, `dare_ties`, `della`, `della_ties` and `sce`
- `spectral_rules`: the rules `low_rank` and `tsv`
- `projection_rules`: the rule `without`
- `importance_rules`: the rule `importance`
- `mergekit_rule`: the rule `mergekit`, which is all of mergekit's methods, with parameters by layer and by name
- `rule_registry`: what a rule is; `rule`, which registers one under its name, and `rules`, which lists them
- `option_checks`: checks of the numbers that rules take as options
- `order_statistics`: the k-th smallest magnitude of a parameter, without sorting it
- `scale_search`: `search_scale`, which finds the λ of the highest score

A new rule is one function with the decorator `rule`; nothing else needs to be changed.
"""

import hf_taskvec.merging.angle_rules
import hf_taskvec.merging.elected_rules
import hf_taskvec.merging.importance_rules
import hf_taskvec.merging.linear_rules
import hf_taskvec.merging.mergekit_rule
import hf_taskvec.merging.projection_rules
import hf_taskvec.merging.sparse_rules
import hf_taskvec.merging.spectral_rules  # noqa: F401 (each of them registers its rules)
from hf_taskvec.merging.combining import combine
from hf_taskvec.merging.rule_registry import Change, Parameter, Rule, rule, rules
from hf_taskvec.merging.scale_search import ScaleSearch, search_scale

__all__ = ["Change", "Parameter", "Rule", "ScaleSearch", "combine", "rule", "rules", "search_scale"]
