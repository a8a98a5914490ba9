"""Small random task vectors of each kind."""

import torch

from hf_taskvec import TaskVector

SHAPES = {
    "model.layers.0.mlp.fc1.weight": (12, 6),
    "model.layers.0.self_attn.q_proj.weight": (6, 6),
    "model.layers.1.mlp.fc2.weight": (6, 12),
    "model.norm.weight": (6,),
}


def random_vector(seed: int, kind: str, size: float = 1.0) -> TaskVector:
    """A dense, a low-rank or a mixed vector; the mixed one leaves a parameter out and sums terms."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return size * torch.randn(*shape, generator=generator)

    dense = {n: draw(*s) for n, s in SHAPES.items()}
    low = {n: (draw(s[0], 2), draw(2, s[1])) for n, s in SHAPES.items() if len(s) == 2}
    if kind == "dense":
        return TaskVector.from_tensors(dense, name=f"d{seed}")
    if kind == "low-rank":
        return TaskVector.from_tensors(low, name=f"l{seed}")
    del dense["model.layers.0.mlp.fc1.weight"]
    both = TaskVector.from_tensors(dense, name=f"d{seed}") - 0.5 * TaskVector.from_tensors(low, name=f"l{seed}")
    return both + TaskVector.from_tensors(low, name=f"m{seed}")
