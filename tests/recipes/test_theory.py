"""The theory's laboratory: its parts against independent computations, and the recipe from end to end, quickly."""

import json
from pathlib import Path

import pytest
import torch
from support import launch

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "recipes"


@pytest.fixture(autouse=True)
def laboratory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(RECIPES))


def test_drawn_data_follows_definition_2() -> None:
    """Labels follow the majority, tokens are patterns, fractions are as asked for."""
    from laboratory.transformer import OneLayerModel, Setting, draw

    setting = Setting(patterns=6)
    mu = OneLayerModel(setting).pattern(1.0)
    x, y = draw(setting, mu, 2000, torch.Generator().manual_seed(0))
    votes = x @ mu
    assert torch.equal(votes.sum(dim=1).sign(), y)
    assert set(votes.unique().tolist()) == {-1.0, 0.0, 1.0}
    torch.testing.assert_close(x.norm(dim=-1), torch.ones(2000, 20))
    assert (votes * y[:, None] == 1).float().mean() == pytest.approx(setting.relevant, abs=0.02)
    assert (votes * y[:, None] == -1).float().mean() == pytest.approx(setting.confusing, abs=0.02)
    assert abs(y.mean()) < 0.1


def test_the_one_layer_transformer_is_equation_4() -> None:
    """The one-layer transformer, with loops."""
    from laboratory.transformer import output

    torch.manual_seed(0)
    x, weights, signs = torch.randn(1, 4, 3), {"W": torch.randn(3, 3), "V": torch.randn(5, 3)}, torch.randn(5)
    total = 0.0
    for query in x[0]:
        scores = torch.stack([key @ weights["W"] @ query for key in x[0]]).softmax(dim=0)
        mixed = sum(score * key for score, key in zip(scores, x[0], strict=True))
        total += (signs @ (weights["V"] @ mixed).relu()).item() / 4
    assert output(x, weights, signs).item() == pytest.approx(total, rel=1e-5)


def test_patterns_have_the_correlations_that_were_asked_for() -> None:
    from laboratory.transformer import OneLayerModel, Setting

    lab = OneLayerModel(Setting())
    one, other, new = lab.pattern(1.0), lab.pattern(0.0, 1.0), lab.pattern(0.8, -0.5)
    assert one @ other == 0 and one @ lab.pattern(-0.5) == -0.5
    assert (one @ new).item() == pytest.approx(0.8) and (other @ new).item() == pytest.approx(-0.5)
    assert new.norm().item() == pytest.approx(1) and lab.pattern(0.3).norm().item() == pytest.approx(1)


@pytest.mark.parametrize(("alpha", "low"), [(-0.5, -4.0), (-0.9, -1 / 0.81), (0.0, -2.0), (0.5, 0.0)])
def test_the_regions_are_those_that_the_theorems_state(alpha: float, low: float) -> None:
    from laboratory.transformer import theorems

    assert theorems(alpha).forget.low == pytest.approx(low)
    assert (theorems(alpha).add.low is None) == (alpha < 0)


@pytest.mark.parametrize("rows", [1, 22, 39])
def test_rows_are_pruned_by_norm(rows: int) -> None:
    """Those of the largest norm stay, and no other part of the vector changes."""
    from laboratory.transformer import OneLayerModel, Setting

    lab = OneLayerModel(Setting(patterns=4, width=40, batch=32, steps=5))
    vector = lab.finetuned(lab.pattern(1.0), "task")
    found, dense = lab.largest(vector, rows), vector.dense("V")
    kept = dense.norm(dim=1).topk(rows).indices
    torch.testing.assert_close(found.dense("V"), torch.zeros_like(dense).index_copy(0, kept, dense[kept]))
    torch.testing.assert_close(found.dense("W"), vector.dense("W"))


def test_the_gap_is_that_of_whole_hessians() -> None:
    """C of eq. (3) with Hessians written out."""
    from laboratory.gradients import ALPHA, loss, make_problem

    problem = make_problem(1)
    path = problem.joint(0.1, 3)
    expected = torch.zeros_like(problem.base)
    for task, data in enumerate(problem.tasks):
        for e in (0, 1):
            drift = torch.zeros_like(problem.base)
            for m in range(e + 1):
                gradients = [problem.gradient(path[m], other) for other in range(3)]
                drift += ALPHA * sum(gradients) - gradients[task]
            hessian = torch.func.hessian(loss)(path[e], *data)
            expected += hessian @ drift
    torch.testing.assert_close(problem.gap(path), expected, atol=1e-12, rtol=1e-9)


def test_stable_ranks_of_networks_are_those_of_their_singular_values() -> None:
    from laboratory.decay import stable_ranks

    torch.manual_seed(0)
    weights = [torch.randn(3, 5, 4), torch.randn(3, 2, 5)]
    found = stable_ranks(weights)
    values = torch.linalg.svdvals(weights[0][1])
    assert found[1, 0].item() == pytest.approx((values.square().sum().sqrt() / values[0]).item(), rel=1e-5)
    assert found.shape == (3, 2)


def test_the_recipe_writes_its_table_and_figures(tmp_path: Path) -> None:
    result = launch.run(RECIPES / "theory.py", "--quick", "--output", tmp_path, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    claims = json.loads((tmp_path / "theory.json").read_text("utf-8"))
    assert sum("rows of ΔV" in claim["claim"] for claim in claims) == 2  # pruned by luck and by norm
    assert len(claims) >= 30 and {"claim", "predicted", "measured", "holds"} < set(claims[0])
    table = (tmp_path / "theory.md").read_text("utf-8")
    assert all(claim["measured"].replace("|", "\\|") in table for claim in claims)
    assert "--quick" in table
    for name in ("one_layer", "transfer", "gap", "linearity", "weight_decay"):
        assert f"({name}.png)" in table
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000 and (tmp_path / f"{name}.svg").exists()
    # What holds exactly holds however quickly it is looked at.
    exact = [c for c in claims if "one epoch" in c["claim"] or "Lemma 5" in c["claim"] or "η²" in c["claim"]]
    assert [c["holds"] for c in exact if "prints" not in c["claim"]] == [True] * (len(exact) - 1)
