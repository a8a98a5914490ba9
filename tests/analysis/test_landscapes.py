"""The loss landscape against models edited by hand; resuming; and that nothing of it stays in the model."""

import copy
import math
from pathlib import Path

import pytest
import torch
from support.tiny_models import make
from support.token_rows import edited, rows
from transformers import BatchEncoding

from hf_taskvec import TaskVector
from hf_taskvec.analysis import landscapes, loss_landscape, token_batches
from hf_taskvec.errors import BadValueError, CorruptFileError, OutputError


@pytest.fixture(scope="module")
def vectors(trio) -> list[TaskVector]:
    return [TaskVector.from_finetuned(trio[0], model, name=name) for model, name in zip(trio[1:], "ab", strict=True)]


def plain_loss(model: torch.nn.Module, data: list[list[int]]) -> float:
    total = 0.0
    for row in data:
        with torch.no_grad():
            logits = model(torch.tensor([row])).logits[0, :-1].double()
        total += torch.nn.functional.cross_entropy(logits, torch.tensor(row[1:]), reduction="sum").item()
    return total / sum(len(row) - 1 for row in data)


def test_every_point_is_the_edited_models_loss(trio, vectors) -> None:
    base, one, other = trio
    before = copy.deepcopy(base.state_dict())
    data = {"x": rows(0), "y": rows(1)}
    found = loss_landscape(base, *vectors, data, size=3, margin=0.0, batch_size=3)
    assert all(torch.equal(value, base.state_dict()[name]) for name, value in before.items())
    a, b = (torch.cat([vector.dense(n, torch.float64).flatten() for n in vectors[0]]) for vector in vectors)
    u = a / a.norm()
    v = b - (b @ u) * u
    v = v / v.norm()
    assert found.points["a"] == pytest.approx((a.norm().item(), 0.0))
    assert found.points["b"] == pytest.approx(((b @ u).item(), (b @ v).item()), abs=1e-9)
    for i, x in enumerate(found.x):
        for j, y in enumerate(found.y):
            # x u + y v in terms of the two vectors, by least squares
            basis = torch.stack([a, b], dim=1)
            scales = torch.linalg.lstsq(basis, (x * u + y * v)[:, None]).solution.flatten().tolist()
            model = edited(base, (scales[0], one), (scales[1], other))
            for name, each in data.items():
                assert found.losses[name][j][i] == pytest.approx(plain_loss(model, each), abs=1e-4)


def test_the_three_models_are_on_the_plane(trio, vectors) -> None:
    """θ_0 lies at a corner of the grid's own box, whatever the margin."""
    found = loss_landscape(trio[0], *vectors, rows(0), size=2, margin=0.0)
    assert (found.x[0], found.y[0]) == pytest.approx((min(0.0, found.points["b"][0]), 0.0))
    wide = loss_landscape(trio[0], *vectors, rows(0), size=2, margin=0.5)
    assert wide.x[1] - wide.x[0] == pytest.approx(2 * (found.x[1] - found.x[0]))


def test_an_interrupted_run_continues(trio, vectors, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, calls = trio[0], []
    whole = loss_landscape(base, *vectors, rows(0), size=3)
    before = copy.deepcopy(base.state_dict())

    def counting(*args: object) -> float:
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return token_batches.mean_loss(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(landscapes, "mean_loss", counting)
    with pytest.raises(KeyboardInterrupt):
        loss_landscape(base, *vectors, rows(0), size=3, output=tmp_path)
    assert all(torch.equal(value, base.state_dict()[name]) for name, value in before.items())
    (kept,) = tmp_path.iterdir()
    with kept.open("a") as file:
        file.write('{"x": 1, "y"')  # killed while writing
    again = loss_landscape(base, *vectors, rows(0), size=3, output=tmp_path)
    assert len(calls) == 5 + 9 - 4 and again == whole
    assert loss_landscape(base, *vectors, rows(0), size=3, output=tmp_path) == whole and len(calls) == 10
    other = loss_landscape(base, *vectors, rows(1), size=3, output=tmp_path)  # other data: beside it
    assert other != whole and len(calls) == 19 and len(list(tmp_path.iterdir())) == 2
    assert loss_landscape(base, *vectors, rows(0), size=3, output=tmp_path) == whole and len(calls) == 19
    for damaged in ("no json\n", '{"key": "another"}\n'):
        kept.write_text(damaged)
        with pytest.raises(CorruptFileError, match="remove it"):
            loss_landscape(base, *vectors, rows(0), size=3, output=tmp_path)


def test_low_rank_vectors_may_be_attached(trio) -> None:
    torch.manual_seed(0)
    name = "model.layers.0.mlp.fc1.weight"
    vectors = [TaskVector.from_tensors({name: (torch.randn(32, 2), torch.randn(2, 16))}, name=n) for n in "ab"]
    merged, attached = (loss_landscape(trio[0], *vectors, rows(0), size=2, merge=merge) for merge in (True, False))
    for one, other in zip(merged.losses["data"], attached.losses["data"], strict=True):
        assert one == pytest.approx(other, abs=1e-5)


def test_a_tokenizers_output_is_one_data_set(trio, vectors) -> None:
    data = rows(0)
    expected = loss_landscape(trio[0], *vectors, data, size=2)
    longest = max(map(len, data))
    padded = BatchEncoding(
        {
            "input_ids": [row + [0] * (longest - len(row)) for row in data],
            "attention_mask": [[1] * len(row) + [0] * (longest - len(row)) for row in data],
        }
    )
    assert loss_landscape(trio[0], *vectors, padded, size=2) == expected


def test_a_plane_or_grid_that_does_not_exist_is_refused(trio, vectors, tmp_path: Path) -> None:
    base = trio[0]
    with pytest.raises(BadValueError, match="parallel"):
        loss_landscape(base, vectors[0], -2 * vectors[0], rows(0))
    with pytest.raises(BadValueError, match="size=1"):
        loss_landscape(base, *vectors, rows(0), size=1)
    with pytest.raises(BadValueError, match="margin=-1"):
        loss_landscape(base, *vectors, rows(0), margin=-1)
    with pytest.raises(BadValueError, match="x is empty"):
        loss_landscape(base, *vectors, {"x": []})
    with pytest.raises(BadValueError, match="the data is empty"):
        loss_landscape(base, *vectors, {})
    with pytest.raises(BadValueError, match="needs a live model, not str"):
        loss_landscape("me/model", *vectors, rows(0))  # type: ignore[arg-type]
    with pytest.raises(BadValueError, match="'me/vector' is not a task vector"):
        loss_landscape(base, vectors[0], "me/vector", rows(0))  # type: ignore[arg-type]
    (tmp_path / "file").touch()
    with pytest.raises(OutputError):
        loss_landscape(base, *vectors, rows(0), size=2, output=tmp_path / "file")


def test_an_edit_that_overflows_is_refused(trio, vectors, tmp_path: Path) -> None:
    """Rather than drawn as nan; and no such point is kept."""
    base, before = trio[0], copy.deepcopy(trio[0].state_dict())
    with pytest.raises(BadValueError, match=r"the loss on data is nan at θ_0 \+ .*1e\+30\*a"):
        loss_landscape(base, 1e30 * vectors[0], 1e30 * vectors[1], rows(0), size=2, margin=0.0, output=tmp_path)
    assert all(torch.equal(value, base.state_dict()[name]) for name, value in before.items())
    assert "nan" not in next(tmp_path.iterdir()).read_text().lower()


def test_the_loss_is_that_of_transformers() -> None:
    model, data = make("gpt2"), [row for row in rows(0) if len(row) == len(rows(0)[0])]
    ids = torch.tensor(data)
    with torch.no_grad():
        expected = model(ids, labels=ids).loss.item()
    assert math.isclose(token_batches.mean_loss(model, data, 2), expected, rel_tol=1e-5)
