"""What work takes: right within the factor that is told, against what it took; and nothing is measured twice."""

import time

import pytest
import torch
from support.tiny_books import tiny_llama

from hf_taskvec.machine_speed import MachineSpeed, duration, machine_speed


def test_the_slower_of_products_and_memory_decides() -> None:
    speed = MachineSpeed(multiplications=1e9, reading=1e8, layer=0.01)
    assert speed.forward(1_000_000, 3, tokens=1000) == pytest.approx(2.0 + 0.03)
    assert speed.forward(1_000_000, 3, tokens=1) == pytest.approx(0.04 + 0.03)
    assert speed.forward(1_000_000, 3, tokens=1, element_bytes=2) == pytest.approx(0.02 + 0.03)


def test_a_pass_takes_about_what_is_told() -> None:
    model = tiny_llama(width=256)
    ids = torch.ones(8, 64, dtype=torch.long)
    with torch.inference_mode():
        model(ids)
        begin = time.process_time()
        for _ in range(5):
            model(ids)
        took = (time.process_time() - begin) / 5
    told = machine_speed().forward(sum(p.numel() for p in model.parameters()), 2, tokens=8 * 64)
    assert told > took / 10 and told < 100 * took  # wide: other work on the machine slows either
    assert machine_speed() is machine_speed()


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.2, "1 second"),
        (1.4, "1 second"),
        (2, "2 seconds"),
        (90, "1.5 minutes"),
        (5400, "1.5 hours"),
        (1e6, "12 days"),
    ],
)
def test_durations_are_said_as_people_say_them(seconds: float, words: str) -> None:
    assert duration(seconds) == words
