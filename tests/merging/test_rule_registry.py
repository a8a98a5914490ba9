"""Rules are found and listed by their names."""

from __future__ import annotations

from support.example_vectors import some_vectors

from hf_taskvec import rules


def test_rules_are_listed_with_what_a_card_needs() -> None:
    found = rules()
    assert list(found) == sorted(found)
    assert {"sum", "mean", "weighted", "interpolate", "layers"} <= found.keys()
    assert {"magnitude", "rows", "ties", "dare", "breadcrumbs", "negmerge"} <= found.keys()
    assert {"low_rank", "tsv", "without", "importance"} <= found.keys()
    assert found["ties"].paper == "https://arxiv.org/abs/2306.01708"
    assert found["ties"].options["density"] == 0.2
    assert all(each.summary.endswith(".") and "\n" not in each.summary for each in found.values())


def test_the_name_means_the_function_whatever_was_imported() -> None:
    import hf_taskvec.merging.combining

    a, b, _ = some_vectors()
    assert hf_taskvec.combine([a, b]) == a + b
    assert hf_taskvec.merging.combine is hf_taskvec.combine
