"""The whole matrix: `make test-matrix`. Outcomes are kept as they come, so that a killed run goes on where it was."""

import pytest
from matrix import results
from matrix.cases import all_cases, run

_ROWS: dict[str, list[tuple[str, str]]] = {}
for _row, _check in all_cases():
    # A type's checks share imports and layouts; the cases of LoraConfig are many, and go by their first field.
    _ROWS.setdefault(_row if _row != "LoraConfig" else f"LoraConfig {_check.partition(' ')[0].rstrip(':')}", []).append(
        (_row, _check)
    )


@pytest.mark.matrix
@pytest.mark.parametrize("label", _ROWS)
@pytest.mark.filterwarnings("ignore")
def test_outcomes_are_the_committed_ones(label):
    found = results.kept()
    for key in _ROWS[label]:
        if key not in found:
            found[key] = run(*key)
            results.keep(*key, found[key])
    changed = results.differences(found, results.expected()[1], _ROWS[label], reasons=True)
    assert not changed, "\n".join([*changed, "If this is meant: `make matrix-table`, and look at what changed."])
