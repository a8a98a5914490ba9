"""Edits of live models that are sharded over processes, wrapped or compiled: the bits are those of the plain model."""

import pytest
import torch
from support import launch, tiny_models
from support.tiny_models import Pair
from support.weight_snapshots import same, state
from transformers import AutoModelForCausalLM

from hf_taskvec import TaskVector
from hf_taskvec.algebra.blocks import Block
from hf_taskvec.errors import UnsupportedError

TOKENS = torch.arange(8)[None] % 20


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    base = tiny_models.make("llama", num_attention_heads=4, num_key_value_heads=4)
    return tiny_models.save_pair(tmp_path_factory.mktemp("sharded"), base, tiny_models.tuned_copy(base))


@pytest.mark.parametrize(
    ("processes", "parts"),
    [
        (2, ["refusals", "by_fsdp", "by_tensor_parallelism", "by_ddp"]),
        (2, ["experts_by_fsdp"]),
        (4, ["by_copies_of_fsdp", "by_both"]),
        pytest.param(4, ["by_fsdp", "by_tensor_parallelism"], marks=pytest.mark.slow),
        pytest.param(2, ["placements"], marks=pytest.mark.slow),
        pytest.param(2, ["experts_by_tensor_parallelism"], marks=pytest.mark.slow),
        pytest.param(4, ["experts_by_fsdp"], marks=pytest.mark.slow),
        (4, ["placements"]),
    ],
)
def test_each_process_edits_its_part_and_together_they_are_the_plain_edit(
    pair: Pair, processes: int, parts: list[str]
) -> None:
    said = launch.succeed(launch.SUPPORT / "launched_sharded.py", pair.base.parent, *parts, processes=processes)
    assert said.strip().endswith("all the same")


@pytest.mark.parametrize("way", ["torch.compile", "model.compile", "layers"])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_compiled_model_follows_its_weights(pair: Pair, way: str, backend: str) -> None:
    vector = pair.vector()
    plain, model = (AutoModelForCausalLM.from_pretrained(pair.base) for _ in range(2))
    before, called = state(plain), model
    if way == "torch.compile":
        called = torch.compile(model, backend=backend)
    elif way == "model.compile":
        model.compile(backend=backend)
    else:
        for number, layer in enumerate(model.model.layers):
            model.model.layers[number] = torch.compile(layer, backend=backend)
    inner = dict(model.named_parameters())
    with torch.no_grad():
        untouched = called(TOKENS).logits  # compiled now
        with vector.applied_to(called, -0.6) as edit:
            for scale in (-0.6, 1.0):
                edit.set_scale(scale)
                with vector.applied_to(plain, scale):
                    names = {name.replace("_orig_mod.", ""): each for name, each in inner.items()}
                    assert all(torch.equal(names[name], each) for name, each in plain.named_parameters())
                    assert torch.allclose(called(TOKENS).logits, plain(TOKENS).logits, atol=1e-6)
                assert not torch.allclose(called(TOKENS).logits, untouched, atol=1e-4)
        assert torch.equal(called(TOKENS).logits, untouched)
    assert same(plain, before)
    with pytest.raises(UnsupportedError, match=r"compiled.*merge=True"):
        tiny_models.low_rank(plain).edit(called, merge=False)


def test_code_that_holds_the_weights_is_refused(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._inductor.config as inductor

    model = torch.compile(AutoModelForCausalLM.from_pretrained(pair.base), backend="aot_eager")
    monkeypatch.setattr(inductor, "freezing", True)
    with pytest.raises(UnsupportedError, match="freezing"):
        pair.vector().edit(model)


def test_a_compiled_fine_tune_gives_the_vector_of_its_folder(pair: Pair) -> None:
    tuned = torch.compile(AutoModelForCausalLM.from_pretrained(pair.tuned), backend="aot_eager")
    vector, expected = TaskVector.from_finetuned(pair.base, tuned), pair.vector()
    assert all(torch.equal(vector.dense(name), expected.dense(name)) for name in expected)


@pytest.mark.parametrize(
    "positions",
    [
        [range(2, 5), range(6)],
        [range(8), range(1, 3)],
        [[0, 1, 5], [2, 5]],
        [[], range(6)],
        [[3], [0, 1, 2, 5]],
    ],
)
def test_a_block_is_cut_and_placed_as_torch_indexes(positions: list[list[int]]) -> None:
    block, whole = Block.of(positions), torch.arange(48.0).view(8, 6)
    index = torch.meshgrid(*(torch.tensor(list(each), dtype=torch.long) for each in positions), indexing="ij")
    assert torch.equal(block.cut(whole), whole[index])
    target, expected = torch.zeros(8, 6), torch.zeros(8, 6)
    block.place(block.cut(whole), target)
    expected[index] = whole[index]
    assert torch.equal(target, expected)
    for start, stop in ((0, 4), (4, 8)):  # tile by tile
        first, last = block.rows(start, stop)
        assert torch.equal(block.cut(whole[start:stop], start), whole[index][first:last])
