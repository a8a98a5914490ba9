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


@pytest.fixture
def few_tokens():
    from laboratory.one_layer import Setting

    return Setting(patterns=4, width=30, tokens=8, relevant=0.5, confusing=0.125, tests=40)


def test_attended_is_p_n_of_the_paper(few_tokens) -> None:
    """With loops: a label-relevant query's weights on label-relevant keys, summed."""
    from laboratory.lemmas import attended
    from laboratory.one_layer import OneLayerModel, draw

    lab = OneLayerModel(few_tokens)
    mu = lab.pattern(1.0)
    weights = {"W": 2 * torch.randn(few_tokens.size, few_tokens.size), "V": lab.base["V"]}
    x, y = draw(few_tokens, mu, few_tokens.tests, torch.Generator().manual_seed(12))
    found = []
    for sample, label in zip(x, y, strict=True):
        relevant = [n for n, token in enumerate(sample) if torch.allclose(token, label * mu)]
        for query in relevant:
            shares = torch.stack([key @ weights["W"] @ sample[query] for key in sample]).softmax(dim=0)
            found.append(sum(shares[key].item() for key in relevant))
    assert attended(lab, weights, mu) == pytest.approx(sum(found) / len(found), rel=1e-5)


def test_samples_of_four_classes_follow_appendix_f() -> None:
    from laboratory.lemmas import _bits
    from laboratory.one_layer import Setting

    setting = Setting(patterns=4)
    mus = torch.eye(setting.size)[4:6]
    x, y = _bits(setting, mus, 500, torch.Generator().manual_seed(0))
    assert x.shape == (500, setting.tokens, setting.size)
    for bit, mu in enumerate(mus):
        votes = x @ mu
        assert torch.equal(votes.sum(dim=1).sign(), y[:, bit])
        assert ((votes * y[:, bit, None] == 1).sum(dim=1) == 4).all() and ((votes != 0).sum(dim=1) == 5).all()
    assert len(y.unique(dim=0)) == 4 and torch.allclose(x.norm(dim=2), torch.ones(500, setting.tokens))


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


def test_the_vit_is_torchs_own() -> None:
    """Attention and layer norms by `torch.nn`, block by block."""
    from laboratory.digits import BLOCKS, HEADS, SIZE, logits, make_weights

    weights = {k: v.double() for k, v in make_weights(torch.Generator().manual_seed(0), 2).items()}
    x = torch.randn(3, 16, 8, dtype=torch.float64)
    norm = torch.nn.LayerNorm(SIZE, elementwise_affine=False)
    h = x @ weights["patches"].T + weights["places"]
    for n in range(BLOCKS):
        attention = torch.nn.MultiheadAttention(SIZE, HEADS, bias=False, batch_first=True).double()
        attention.in_proj_weight.data.copy_(weights[f"{n}.qkv"])
        attention.out_proj.weight.data.copy_(weights[f"{n}.o"])
        h = h + attention(norm(h), norm(h), norm(h), need_weights=False)[0]
        h = h + torch.nn.GELU()(norm(h) @ weights[f"{n}.in"].T) @ weights[f"{n}.out"].T
    expected = norm(h).mean(dim=1) @ weights["head"].T
    torch.testing.assert_close(logits(weights, x), expected)


def test_several_digit_models_are_trained_by_adam_at_once() -> None:
    """Each as alone, by torch's Adam on the same batches."""
    from laboratory.digits import logits, make_weights, train

    generator = torch.Generator().manual_seed(1)
    weights = {k: torch.stack([v, v]).double() for k, v in make_weights(generator, 2).items()}
    x, y = torch.randn(2, 150, 16, 8, dtype=torch.float64), torch.randint(0, 2, (2, 150))
    found = train(weights, x, y, 2, torch.Generator().manual_seed(2), "test")
    for n in range(2):
        own = {k: v[n].clone().requires_grad_() for k, v in weights.items()}
        adam = torch.optim.Adam(own.values(), lr=2e-3, betas=(0.9, 0.99), eps=1e-8)
        order = torch.Generator().manual_seed(2)
        for _ in range(2):
            for rows in torch.randperm(150, generator=order).split(100):
                adam.zero_grad()
                torch.nn.functional.cross_entropy(logits(own, x[n, rows]), y[n, rows]).backward()
                adam.step()
        for key, value in own.items():
            torch.testing.assert_close(found[key][n], value.detach(), atol=1e-8, rtol=1e-6)


def test_a_new_task_is_reported_on_digits_that_chose_no_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vector alone is a point of the grid: on the same half it has the same accuracy."""
    pytest.importorskip("sklearn")
    from laboratory import digits

    monkeypatch.setattr(digits, "AXIS", (0.0, 1.0))
    monkeypatch.setattr(digits, "SCALES", (0.0,))
    draw = digits.measure(0, 1)
    assert draw.grid[0, 1].item() == pytest.approx(draw.single[0])
    assert draw.grid[1, 0].item() == pytest.approx(draw.single[1])
    assert not torch.equal(draw.grid, draw.chosen_on)
    assert digits.chosen(torch.tensor([[0.0, 2.0, 1.0], [1.0, 0.0, 2.0]])) == (0, 1)


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


def test_a_tasks_own_model_is_expanded_as_lemma_1_has_it() -> None:
    """With Hessians written out, from the two sums of eqs. (7) and (8)."""
    from laboratory.gradients import ALPHA, loss, make_problem

    problem, rate = make_problem(2), 0.07
    path = problem.joint(rate, 3)
    for task, data in enumerate(problem.tasks):
        r = [ALPHA * sum(problem.gradient(p, n) for n in range(3)) - problem.gradient(p, task) for p in path]
        hessians = [torch.func.hessian(loss)(p, *data) for p in path[:2]]
        s = hessians[0] @ r[0] + hessians[1] @ (r[0] + r[1])
        expected = path[3] + rate * (r[0] + r[1] + r[2]) - rate**2 * s
        torch.testing.assert_close(problem.expanded(path, task, rate), expected, atol=1e-12, rtol=1e-9)


def test_the_rest_of_a_relu_networks_hessian_is_of_the_network_itself() -> None:
    """What JᵀHJ leaves of the loss's Hessian is Σ_k g_k ∇²z_k: 0 within each layer, not between them."""
    from laboratory.bounds import layers, outer_part
    from laboratory.gradients import logits, loss, make_problem

    problem = make_problem(activation=torch.relu)
    theta, (x, y) = problem.base, problem.tasks[1]
    rest = torch.func.hessian(loss)(theta, x, y, torch.relu) - outer_part(theta, problem, 1)
    outputs = logits(theta, x, torch.relu)
    slopes = (outputs.softmax(dim=1) - torch.nn.functional.one_hot(y, 3)) / len(x)
    expected = torch.func.hessian(lambda at: (slopes * logits(at, x, torch.relu)).sum())(theta)
    torch.testing.assert_close(rest, expected, atol=1e-12, rtol=1e-9)
    start = 0
    for matrix in layers(theta):
        own = slice(start, start := start + matrix.numel())
        assert rest[own, own].abs().max() < 1e-14
    assert rest.abs().max() > 1e-3


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
    relu = bounds(1.0, torch.relu)
    steps, widest = 3 * 3 * 4 / 2 * (0.4 * 3 + 1), relu.printed_gradient / math.sqrt(2)  # M_x Π
    assert relu.printed == pytest.approx(steps * math.sqrt(2) / 2 * widest**3, rel=1e-10)


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


def test_two_models_are_compared_with_each_other() -> None:
    """Figure 2's baseline, cos[f(θ_i), f(θ_j)]; the average of k models has another."""
    from laboratory.averaging import average_measures, halfway_measures
    from laboratory.pictures import features

    weights, x = small_networks(2), torch.randn(5, 4, dtype=torch.float64)
    cosine, coefficient, baseline = halfway_measures(weights, x)
    own = [features([weight[n] for weight in weights], x) for n in range(2)]
    for layer, (one, other) in enumerate(zip(*own, strict=True)):
        expected = (one * other).sum(dim=1) / (one.norm(dim=1) * other.norm(dim=1)).clamp_min(1e-12)
        torch.testing.assert_close(baseline[layer], expected)
    assert torch.equal(cosine, average_measures(weights, x)[0])
    assert torch.equal(coefficient, average_measures(weights, x)[1])


def test_figures_11_and_12_use_the_baseline_of_a_pair() -> None:
    from laboratory import averaging, matching, pictures

    networks = pictures.initial(torch.Generator().manual_seed(6), 2)
    x = torch.randn(20, pictures.SIZES[0])
    expected = averaging.halfway_measures(networks, x)[2][:-1]
    assert torch.equal(matching.hidden_measures(networks, x)[2], expected)


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


def test_the_landscape_has_each_model_at_its_point() -> None:
    """Coordinates on the plane give the models back, and its errors are the models' own."""
    from laboratory import pictures, rounds

    world, generator = pictures.make_world(3, 2), torch.Generator().manual_seed(0)
    base, weights = pictures.initial(generator), pictures.initial(generator, 2)
    found = rounds.landscape(base, weights, world.drawn(300, generator), 5)
    start, flat = pictures.flat(base)[0].double(), pictures.flat(weights).double()
    one, other = flat - start
    assert found.points["task 1"] == pytest.approx((one.norm().item(), 0))
    assert math.hypot(*found.points["task 2"]) == pytest.approx(other.norm().item())
    assert math.cos(math.radians(found.degrees)) == pytest.approx(torch.cosine_similarity(one, other, dim=0).item())
    apart = math.dist(found.points["task 1"], found.points["task 2"])
    assert apart == pytest.approx((one - other).norm().item())
    tests = world.drawn(300, torch.Generator().manual_seed(4))
    # A grid of two by two has its corners only: compare one of them with the model built there.
    corners = rounds.landscape(base, weights, tests, 2)
    u = one / one.norm()
    v = other - (other @ u) * u
    point = (start + corners.x[1] * u + corners.y[0] * v / v.norm()).float()
    parts = point.split([weight[0].numel() for weight in base])
    model = [part.view(1, *weight.shape[1:]) for part, weight in zip(parts, base, strict=True)]
    expected = 100 - pictures.on_all_tasks(pictures.accuracies, model, tests)[0, 1].item()
    assert corners.errors[1][0, 1].item() == pytest.approx(expected, abs=0.5)


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


def test_lemma_4_is_as_printed() -> None:
    """K = 3, λ = 0.01, L = 0.3: its bounds by hand, and the corrected one."""
    from laboratory.stationary import DECAYS, Stationary, _lemma4

    empty = torch.zeros(3, 3)
    found = Stationary([0.0] * 3, empty, torch.ones(3), empty, [0.7] * 3, [0.3] * 3)
    twos, threes, squares = _lemma4(found)
    decay = DECAYS[1]
    assert twos[1] == pytest.approx(0.7 / (decay / 0.3 ** (1 / 6)) ** 0.5)
    assert threes[1] == pytest.approx(0.7 * (decay * math.e) ** (1 / 3) * math.e ** (1 / 3) / (decay * math.e))
    norm = (1 / (math.e * decay)) ** 0.5  # B² = 1/(eλ), in (λB²)^(1/K) / B
    assert squares[1] == pytest.approx(0.7 / ((decay * norm**2) ** (1 / 3) / norm))


def test_the_rate_of_a_decay_is_found() -> None:
    from laboratory.gradients import slope
    from laboratory.stationary import _rate

    times = [0.5 * n for n in range(40)]
    assert _rate(times, [3 * math.exp(-0.7 * time) for time in times]) == pytest.approx(0.7)
    assert slope((0.1, 0.2, 0.4), [5 * x**3 for x in (0.1, 0.2, 0.4)]) == pytest.approx(3)


def test_the_smallest_activation_is_that_of_definition_1() -> None:
    """With loops over inputs, layers and neurons."""
    from laboratory.stationary import cosines, smallest

    torch.manual_seed(3)
    x = torch.randn(2, 4, 5, dtype=torch.float64)
    weights = [torch.randn(2, high, wide, dtype=torch.float64) for wide, high in ((5, 6), (6, 7), (7, 1))]
    found = []
    for network in range(2):
        for point in x[network]:
            for weight in weights[:-1]:
                values = [float(row @ point / point.norm()) for row in weight[network]]
                found += [value for value in values if value > 0]
                point = (weight[network] @ point).relu()
    assert smallest(x, weights) == pytest.approx(min(found), rel=1e-10)
    assert cosines(x[0], x[1])[2, 3].item() == pytest.approx(torch.cosine_similarity(x[0, 2], x[1, 3], dim=0).item())
    assert cosines(torch.zeros(1, 5), torch.ones(1, 5)).item() == 0


def test_lemmas_6_and_7_are_integrals_along_the_descent() -> None:
    """A few steps of each, by autograd of the loss; together the layers of Lemma 7 give what the loss falls by."""
    from laboratory import proofs
    from laboratory import stationary as s

    x, y = (each[None] for each in s.data(5))

    def loss(weights: list[torch.Tensor], activation: s.Activation) -> torch.Tensor:
        return torch.nn.functional.softplus(-y * s.output(x, weights, activation)).mean()

    def descend(weights: list[torch.Tensor], activation: s.Activation, decay: float) -> tuple[list, list]:
        own = [weight.clone().requires_grad_() for weight in weights]
        found = torch.autograd.grad(loss(own, activation), own)
        return [w.detach() - 0.1 * (g + decay * w.detach()) for w, g in zip(own, found, strict=True)], list(found)

    chain, linear = [weight[:1] for weight in s.rank_one_weights(8)], s.KINDS["linear"]
    totals, first = [0.0, 0.0], loss(chain, linear).item()
    for step in range(2):
        w = (chain[2][0] @ chain[1][0] @ chain[0][0])[0].requires_grad_()
        whole = torch.nn.functional.softplus(-y[0] * (x[0] @ w)).mean()
        (gradient,) = torch.autograd.grad(whole, w)
        for n, power in enumerate((2 / 3, -2 / 3)):
            totals[n] += 0.1 * 2 * w.norm().item() ** power * abs((gradient @ w).item())
            expected = totals[n] / math.sqrt(2 * 1.03 * first * 0.1 * (step + 1))
            assert proofs.lemma6(2)[n][step] == pytest.approx(expected, rel=1e-10)
        chain, _ = descend(chain, linear, 0.01)

    weights = s.random_weights(8, 1)
    squares, along, start = [0.0] * 3, [0.0] * 3, None
    for _ in range(3):
        margin = (torch.sigmoid(-y * s.output(x, weights, torch.relu)) * y * s.output(x, weights, torch.relu)).mean()
        if start is None or margin < 0:
            squares, along, start = [0.0] * 3, [0.0] * 3, loss(weights, torch.relu).item()
        after, found = descend(weights, torch.relu, 0.01)
        squares = [a + 0.1 * (g**2).sum().item() for a, g in zip(squares, found, strict=True)]
        along = [a + 0.001 * (g * w).sum().item() for a, g, w in zip(along, found, weights, strict=True)]
        weights = after
    fallen = start - loss(weights, torch.relu).item()
    integrals = proofs.lemma7("ReLU", 3)
    assert integrals.squares == pytest.approx([value / fallen for value in squares], rel=1e-9)
    assert integrals.products == pytest.approx([value / fallen for value in along], rel=1e-9)
    assert sum(proofs.lemma7("linear", 400).sums) == pytest.approx(1, abs=0.03)


def test_linear_predictors_descend_on_the_regularised_loss() -> None:
    """One step of both by autograd of `L + λ/2 ‖θ‖²`; at the beginning the bound is what it bounds."""
    from laboratory import proofs

    torch.manual_seed(4)
    x, theta = torch.randn(2, 6, 3, dtype=torch.float64), torch.randn(2, 3, 1, dtype=torch.float64)
    y = torch.where(torch.randn(2, 6) > 0, 1.0, -1.0).double()
    own = theta.clone().requires_grad_()
    loss = torch.nn.functional.softplus(-y * (x @ own)[..., 0]).mean(dim=1).sum() + 0.15 * own.square().sum()
    (gradient,) = torch.autograd.grad(loss, own)
    found = proofs.linear_step(theta, x, y, rate=0.2, decay=0.3)
    torch.testing.assert_close(found, theta - 0.2 * gradient, atol=1e-14, rtol=1e-12)
    assert proofs.linear_example(0) == pytest.approx(1) and proofs.linear_example(50) >= 1


def test_initial_chains_are_balanced_as_theorem_1_asks() -> None:
    from laboratory.stationary import rank_one_weights

    weights = rank_one_weights(1)
    for lower, upper in itertools.pairwise(weights):
        torch.testing.assert_close(upper.transpose(1, 2) @ upper, lower @ lower.transpose(1, 2))
    assert not torch.allclose(weights[0][0], weights[0][1])


# The recipe.


def test_the_page_of_results_counts_the_claims_that_are_kept() -> None:
    """And each claim is there once in each setting."""
    from laboratory.claims import Claim, counted

    kept = [Claim(**each) for each in json.loads((ROOT / "docs/evidence/theory.json").read_text("utf-8"))]
    assert len({(each.paper, each.claim, each.setting) for each in kept}) == len(kept)
    found = counted(kept)
    text = " ".join((ROOT / "docs/results.md").read_text("utf-8").split())
    assert f"{sum(each.holds for each in found)} of {len(found)} hold" in text


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
    assert [c["holds"] for c in exact if not c["erratum"]] == [True] * 4 and len(exact) == 5
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
