"""The theory's laboratory: its parts against independent computations, and the recipe from end to end, quickly."""

import itertools
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from support import launch

from hf_taskvec.errors import UnsupportedError

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "recipes"


@pytest.fixture(autouse=True)
def laboratory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(RECIPES))


# The one-layer transformer.


@pytest.mark.parametrize("exact", [True, False])
def test_drawn_data_follows_definition_2(exact: bool) -> None:
    """Labels follow the majority, tokens are patterns, fractions are as asked for: on average, or in every sample."""
    from laboratory.one_layer import OneLayerModel, Setting, draw

    setting = Setting(patterns=6, exact=exact)
    mu = OneLayerModel(setting).pattern(1.0)
    x, y = draw(setting, mu, 2000, torch.Generator().manual_seed(0))
    votes = x @ mu
    assert torch.equal(votes.sum(dim=1).sign(), y)
    assert set(votes.unique().tolist()) == {-1.0, 0.0, 1.0}
    torch.testing.assert_close(x.norm(dim=-1), torch.ones(2000, 20))
    relevant, confusing = ((votes * y[:, None] == sign).float().mean(dim=1) for sign in (1, -1))
    assert relevant.mean() == pytest.approx(setting.relevant, abs=0.02)
    assert confusing.mean() == pytest.approx(setting.confusing, abs=0.02)
    assert (relevant.std() < 1e-6 and confusing.std() < 1e-6) == exact
    assert abs(y.mean()) < 0.1


def test_the_one_layer_transformer_is_equation_4() -> None:
    """The one-layer transformer, with loops."""
    from laboratory.one_layer import attention, output

    torch.manual_seed(0)
    x, weights, signs = torch.randn(1, 4, 3), {"W": torch.randn(3, 3), "V": torch.randn(5, 3)}, torch.randn(5)
    total = 0.0
    for number, query in enumerate(x[0]):
        scores = torch.stack([key @ weights["W"] @ query for key in x[0]]).softmax(dim=0)
        torch.testing.assert_close(attention(x, weights)[0, :, number], scores)
        mixed = sum(score * key for score, key in zip(scores, x[0], strict=True))
        total += (signs @ (weights["V"] @ mixed).relu()).item() / 4
    assert output(x, weights, signs).item() == pytest.approx(total, rel=1e-5)


def test_patterns_have_the_correlations_that_were_asked_for() -> None:
    from laboratory.one_layer import OneLayerModel, Setting

    lab = OneLayerModel(Setting())
    one, other, new = lab.pattern(1.0), lab.pattern(0.0, 1.0), lab.pattern(0.8, -0.5)
    assert one @ other == 0 and one @ lab.pattern(-0.5) == -0.5
    assert (one @ new).item() == pytest.approx(0.8) and (other @ new).item() == pytest.approx(-0.5)
    assert new.norm().item() == pytest.approx(1) and lab.pattern(0.3).norm().item() == pytest.approx(1)


@pytest.mark.parametrize(("alpha", "low"), [(-0.5, -4.0), (-0.9, -1 / 0.81), (0.0, -2.0), (0.5, 0.0)])
def test_the_regions_are_those_that_the_theorems_state(alpha: float, low: float) -> None:
    from laboratory.transformer import promised, theorems

    assert theorems(alpha).forget.low == pytest.approx(low)
    assert (theorems(alpha).add.low is None) == (alpha < 0)
    assert promised(alpha, 0.25) == pytest.approx(min(1, 0.75 - alpha))


@pytest.mark.parametrize("rows", [1, 22, 39])
def test_rows_are_pruned_by_norm(rows: int) -> None:
    """Those of the largest norm stay, and no other part of the vector changes."""
    from laboratory.one_layer import OneLayerModel, Setting

    lab = OneLayerModel(Setting(patterns=4, width=40, batch=32, steps=5))
    vector = lab.finetuned(lab.pattern(1.0), "task")
    found, dense = lab.largest(vector, rows), vector.dense("V")
    kept, norms = found.dense("V").any(dim=1), dense.norm(dim=1)
    assert int(kept.sum()) == rows
    assert norms[kept].min() > norms[~kept].max() - 1e-6  # some are alike but for rounding
    torch.testing.assert_close(found.dense("V")[kept], dense[kept])
    torch.testing.assert_close(found.dense("W"), vector.dense("W"))


def test_lucky_neurons_are_those_of_equations_13_and_14() -> None:
    """Active on the mean token of the label that they vote for; with a small W that is what a query mixes."""
    from laboratory.one_layer import OneLayerModel, Setting, attention, draw

    lab = OneLayerModel(Setting(patterns=4, width=60, tests=2000, spread=0.05))
    mu = lab.pattern(1.0)
    x, y = draw(lab.setting, mu, 2000, torch.Generator().manual_seed(3))
    mixed = attention(x, lab.base).transpose(1, 2) @ x
    votes = (x @ mu) * y[:, None]
    means = [mixed[(y == sign)][votes[y == sign] > 0.5].mean(dim=0) for sign in (1, -1)]
    active = [lab.base["V"] @ mean for mean in means]
    expected = torch.where(lab.signs > 0, *active)
    clear = expected.abs() > 0.02 * expected.abs().max()  # near 0 the sample decides
    assert torch.equal(lab.lucky(mu)[clear], expected[clear] > 0)


# Coloured digits.


def test_patches_hold_the_picture_in_its_colour() -> None:
    from laboratory.digits import patches

    picture = torch.arange(64.0).view(1, 8, 8)
    red, green = (patches(picture, torch.tensor([colour])) for colour in (True, False))
    for row, column, channel in itertools.product(range(4), range(4), range(2)):
        block = picture[0, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2].flatten()
        place = slice(4 * channel, 4 * channel + 4)
        assert torch.equal(red[0, 4 * row + column, place], block * (channel == 0))
        assert torch.equal(green[0, 4 * row + column, place], block * (channel == 1))


def test_the_correlation_is_equation_11() -> None:
    """With loops: each model's outputs less their mean, the mean of cosines, the mean of both sets."""
    from laboratory.digits import correlation

    rng = np.random.default_rng(0)
    sets = [(rng.normal(size=(7, 3)), rng.normal(size=(7, 3))) for _ in range(2)]
    means = []
    for one, other in sets:
        cosines = []
        for a, b in zip(one - one.mean(0), other - other.mean(0), strict=True):
            cosines.append(a @ b / math.sqrt(a @ a * (b @ b)))
        means.append(sum(cosines) / 7)
    found = correlation([(torch.tensor(a), torch.tensor(b)) for a, b in sets])
    assert found == pytest.approx(sum(means) / 2, rel=1e-12)


def test_digits_without_scikit_learn_are_refused_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    from laboratory import digits

    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(UnsupportedError, match=r'pip install "scikit-learn'):
        digits.check()


# Task vectors and gradients.


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


def test_bounds_are_of_a_networks_own_matrices() -> None:
    """Gradients by an `nn.Sequential`, norms by singular values."""
    from laboratory.bounds import EPOCHS, RATE, bounds, layers
    from laboratory.gradients import TASKS, make_problem

    problem = make_problem()
    norms, gradients = [], []
    for theta in problem.joint(RATE, EPOCHS)[: EPOCHS - 1]:
        matrices = layers(theta)
        norms.append([torch.linalg.svdvals(matrix)[0].item() for matrix in matrices])
        linear = [torch.nn.Linear(m.shape[1], m.shape[0], bias=False).double() for m in matrices]
        for module, matrix in zip(linear, matrices, strict=True):
            module.weight.data.copy_(matrix)
        net = torch.nn.Sequential(linear[0], torch.nn.Tanh(), linear[1], torch.nn.Tanh(), linear[2])
        for x, y in problem.tasks:
            found = torch.autograd.grad(torch.nn.functional.cross_entropy(net(x), y), list(net.parameters()))
            gradients.append(torch.cat([each.flatten() for each in found]).norm().item())
    found = bounds(1.0)
    assert len(gradients) == TASKS * (EPOCHS - 1) and found.gradient == pytest.approx(max(gradients), rel=1e-10)
    s = np.max(norms, axis=0)
    most = max(x.norm(dim=1).max().item() for x, _ in problem.tasks)
    assert found.printed_gradient == pytest.approx(math.sqrt(2) * most * s.prod(), rel=1e-10)
    others = math.sqrt(sum((s.prod() / each) ** 2 for each in s))
    assert found.corrected_gradient == pytest.approx(math.sqrt(2) * most * others, rel=1e-10)
    assert found.printed_hessian == pytest.approx(2 * 4 / (3 * math.sqrt(3)) * most**2 * s.prod() ** 2, rel=1e-10)


# Networks on made-up pictures.


def small_networks(count: int) -> list[torch.Tensor]:
    torch.manual_seed(5)
    return [torch.randn(count, high, wide, dtype=torch.float64) for wide, high in ((4, 5), (5, 6), (6, 3))]


def test_features_of_averages_are_compared_sample_by_sample() -> None:
    """Eq. (1) of Zhou et al. (2024), with loops."""
    from laboratory.averaging import average_measures

    weights, x = small_networks(3), torch.randn(2, 4, dtype=torch.float64)
    cosine, coefficient, baseline = average_measures(weights, x)
    for sample, point in enumerate(x):
        own, middle = [point] * 3, point
        for layer, weight in enumerate(weights):
            last = layer == len(weights) - 1
            own = [w @ f if last else (w @ f).relu() for w, f in zip(weight, own, strict=True)]
            middle = weight.mean(0) @ middle if last else (weight.mean(0) @ middle).relu()
            mean = sum(own) / 3
            expected = (middle @ mean / middle.norm() / mean.norm()).item()
            assert cosine[layer, sample].item() == pytest.approx(expected, rel=1e-10)
            assert coefficient[layer, sample].item() == pytest.approx((middle @ mean / mean.square().sum()).item())
            cosines = [(middle @ f / middle.norm() / f.norm()).item() for f in own]
            assert baseline[layer, sample].item() == pytest.approx(sum(cosines) / 3, rel=1e-10)


def test_a_mixture_of_own_features_is_the_model_and_negation_is_equation_4() -> None:
    from laboratory import averaging, pictures

    world = pictures.make_world(1, 2)
    generator = torch.Generator().manual_seed(0)
    base, tuned = pictures.initial(generator), pictures.initial(generator, 2)
    x, y = world.draw(0, 300, generator)
    own = pictures.accuracies(base, (x[None], y[None])).item()
    assert averaging.stitched_accuracy(base, [(0.25, base), (0.75, base)], (x, y)) == pytest.approx(own)
    moved = averaging.moved(base, tuned, 1, 0.3)
    torch.testing.assert_close(moved[0][0], base[0][0] + 0.3 * (tuned[0][1] - base[0][0]))
    hidden = [pictures.features(model, x)[averaging.LAYER] for model in (base, moved)]
    rest = ((2 * hidden[0] - hidden[1]) @ base[2].transpose(1, 2)).relu() @ base[3].transpose(1, 2)
    expected = 100 * (rest[0].argmax(dim=-1) == y).double().mean().item()
    assert averaging.stitched_accuracy(base, [(2.0, base), (-1.0, moved)], (x, y)) == pytest.approx(expected)


def test_matching_finds_the_order_of_a_network_whose_neurons_were_shuffled() -> None:
    from laboratory import matching, pictures

    generator = torch.Generator().manual_seed(3)
    network, x = pictures.initial(generator), torch.randn(200, pictures.SIZES[0], generator=generator)
    order = [torch.randperm(size, generator=generator) for size in pictures.SIZES[1:-1]]
    shuffled = matching.reordered(network, order)
    torch.testing.assert_close(pictures.logits(shuffled, x[None]), pictures.logits(network, x[None]))
    assert not torch.equal(shuffled[0], network[0])
    for found in (matching.match_weights(network, shuffled), matching.match_activations(network, shuffled, x)):
        back = matching.reordered(shuffled, found)
        assert all(torch.equal(one, other) for one, other in zip(back, network, strict=True))


def test_neurons_are_assigned_for_the_largest_sum() -> None:
    from laboratory.matching import assigned

    gain = torch.randn(5, 5, generator=torch.Generator().manual_seed(4))
    rows = range(5)
    best = max(itertools.permutations(rows), key=lambda places: gain[list(rows), list(places)].sum().item())
    assert assigned(gain).tolist() == list(best)


def test_sharpness_is_the_largest_eigenvalue_of_the_hessian() -> None:
    from laboratory import pictures
    from laboratory.averaging import r_squared, sharpness

    weights = [0.5 * weight for weight in small_networks(1)]
    data = (torch.randn(1, 20, 4, dtype=torch.float64), torch.randint(0, 3, (1, 20)))

    def loss(flat: torch.Tensor) -> torch.Tensor:
        parts = flat.split([weight.numel() for weight in weights])
        return pictures.losses([p.view_as(w) for p, w in zip(parts, weights, strict=True)], data).sum()

    hessian = torch.func.hessian(loss)(torch.cat([weight.flatten() for weight in weights]))
    values = torch.linalg.eigvalsh(hessian)
    assert sharpness(weights, data, steps=300) == pytest.approx(max(values.tolist(), key=abs), rel=1e-4)
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=20), rng.normal(size=20)
    line = np.polyval(np.polyfit(x, y, 1), x)
    assert r_squared(x.tolist(), y.tolist()) == pytest.approx(1 - ((y - line) ** 2).sum() / ((y - y.mean()) ** 2).sum())


def test_task_vectors_after_rounds_are_equation_8() -> None:
    """What is accumulated from the updates is what the models are apart from θ_0."""
    from laboratory import pictures, rounds

    world, generator = pictures.make_world(2, rounds.TASKS), torch.Generator().manual_seed(0)
    base, data = pictures.initial(generator), world.drawn(128, generator)
    weights, deltas = rounds.rounds(base, data, 3, 1, generator)
    expected = pictures.flat(weights).double() - pictures.flat(base).double()
    torch.testing.assert_close(rounds.accumulated(deltas)[-1], expected, atol=1e-6, rtol=1e-5)
    cosines = [torch.cosine_similarity(*pair, dim=0).item() for pair in itertools.combinations(expected, 2)]
    assert rounds.cosines(expected).tolist() == pytest.approx(cosines)


def test_proposition_1_holds_for_updates_that_meet_its_assumptions() -> None:
    """Orthogonal between tasks, not opposed within one: exactly, in fp64."""
    from laboratory.rounds import accumulated, cosines

    spaces = torch.linalg.qr(torch.randn(12, 12, dtype=torch.float64)).Q.view(3, 4, 12)
    first = torch.stack([space[0] for space in spaces])
    second = torch.stack([0.4 * space[0] + space[1] for space in spaces])
    one, two = (cosines(each) for each in accumulated([first, second]))
    assert one.abs().max() < 1e-12 and bool((two > 0.05).all())
    opposed = accumulated([first, -3 * first])[1]
    assert bool((cosines(opposed) < 0).any())  # without the second assumption it can fail


# Weight decay.


def test_stable_ranks_of_networks_are_those_of_their_singular_values() -> None:
    from laboratory.decay import stable_ranks

    torch.manual_seed(0)
    weights = [torch.randn(3, 5, 4), torch.randn(3, 2, 5)]
    found = stable_ranks(weights)
    values = torch.linalg.svdvals(weights[0][1])
    assert found[1, 0].item() == pytest.approx((values.square().sum().sqrt() / values[0]).item(), rel=1e-5)
    assert found.shape == (3, 2)


def test_descent_and_lemma_3_are_those_of_the_regularised_loss() -> None:
    """One step by autograd of `L + λ/2 ‖θ‖²`, and Lemma 3's right side with loops."""
    from laboratory import stationary as s

    x, y = (each.expand(1, *each.shape) for each in s.data(3))
    start = s.random_weights(4, 1)
    weights = [weight.clone().requires_grad_() for weight in start]
    total = torch.nn.functional.softplus(-y * s.output(x, weights, torch.relu)).mean()
    total = total + 0.05 * sum(weight.square().sum() for weight in weights) / 2
    expected = [w - 0.2 * g for w, g in zip(weights, torch.autograd.grad(total, weights), strict=True)]
    found = s.descend(x, y, start, torch.relu, (0.05,), 0.2, 1, "one step")
    torch.testing.assert_close(found, [each.detach() for each in expected], atol=1e-14, rtol=1e-12)
    settled = s.settle("ReLU", 1)
    after = s.descend(
        *(e.expand(3, *e.shape) for e in s.data(3)), s.random_weights(4, 3), torch.relu, s.DECAYS, 0.5, 1, ""
    )
    f = s.output(x.expand(3, -1, -1), after, torch.relu)[1]
    margins = [label * value for label, value in zip(y[0].tolist(), f.tolist(), strict=True)]
    mean = sum(m / (1 + math.exp(m)) for m in margins) / len(margins)
    assert settled.expected[1].item() == pytest.approx(mean / s.DECAYS[1], rel=1e-10)
    shares = [torch.linalg.svdvals(w[1])[0] / w[1].norm() for w in after]
    assert settled.inverse[1] == pytest.approx(sum(shares).item() / 3, rel=1e-10)


def test_initial_chains_are_balanced_as_theorem_1_asks() -> None:
    from laboratory.stationary import rank_one_weights

    weights = rank_one_weights(1)
    for lower, upper in itertools.pairwise(weights):
        torch.testing.assert_close(upper.transpose(1, 2) @ upper, lower @ lower.transpose(1, 2))
    assert not torch.allclose(weights[0][0], weights[0][1])


# The recipe.


def test_the_recipe_keeps_what_is_done_and_reports_all_of_it(tmp_path: Path) -> None:
    """A section at a time: each is kept, the report has both, and what other code made is measured again."""
    for only in ("gradients", "rounds"):
        result = launch.run(RECIPES / "theory.py", "--quick", "--only", only, "--output", tmp_path, cwd=ROOT)
        assert result.returncode == 0, result.stderr
    claims = json.loads((tmp_path / "theory.json").read_text("utf-8"))
    assert {"claim", "where", "predicted", "measured", "holds", "erratum", "setting"} < set(claims[0])
    table = (tmp_path / "theory.md").read_text("utf-8")
    assert all(claim["measured"].replace("|", "\\|") in table for claim in claims)
    assert "--quick" in table and "Not in this report: transformer, " in table and "Misprints" in table
    for name in ("gap", "rounds", "rounds_landscape"):
        assert f"({name}.png)" in table
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000 and (tmp_path / f"{name}.svg").exists()
    # What holds exactly holds however quickly it is looked at.
    exact = [c for c in claims if "one epoch" in c["claim"] or "η²" in c["claim"]]
    assert [c["holds"] for c in exact if not c["erratum"]] == [True] * 3 and len(exact) == 4
    kept = json.loads((tmp_path / "rounds.json").read_text("utf-8"))
    (tmp_path / "rounds.json").write_text(json.dumps(kept | {"state": "of other code"}), "utf-8")
    result = launch.run(RECIPES / "theory.py", "--quick", "--only", "gradients", "--output", tmp_path, cwd=ROOT)
    assert "gradients: kept from before" in result.stdout
    table = (tmp_path / "theory.md").read_text("utf-8")
    assert "rounds (of other code)" in table and "(rounds.png)" not in table


@pytest.mark.slow
def test_every_section_runs_quickly(tmp_path: Path) -> None:
    from laboratory.sections import SECTIONS

    pytest.importorskip("sklearn")
    result = launch.run(RECIPES / "theory.py", "--quick", "--output", tmp_path, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    table = (tmp_path / "theory.md").read_text("utf-8")
    assert "Not in this report" not in table and "### Two settings" in table
    for section in SECTIONS.values():
        for name in section.figures:
            assert (tmp_path / f"{name}.png").stat().st_size > 10_000
