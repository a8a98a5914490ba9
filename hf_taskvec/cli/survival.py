"""`taskvec survival`: what quantisation leaves of an edit."""

from typing import Annotated, cast

import typer

from hf_taskvec.cli.arguments import DebugOption, JsonOption, TokenOption, VectorArgument, load_vector, parse_scales
from hf_taskvec.cli.results import CommandResult, TextTable, layer_title


def survival_command(
    vector: VectorArgument,
    base: Annotated[str, typer.Option(metavar="MODEL", help="The model that is edited: a folder or a Hub id.")],
    scheme: Annotated[str, typer.Option(help="The quantisation: nf4, int8, fp8 or int4.")] = "nf4",
    scales: Annotated[str, typer.Option(help="λ: a list, or start:stop:step.")] = "0:-1:-0.2",
    json: JsonOption = False,
    debug: DebugOption = False,
    token: TokenOption = None,
) -> None:
    """Tell what quantisation leaves of MODEL + λ·VECTOR; no model is run.

    A weight survives if the edit gives it another code. Layers are shown at the last λ.

    taskvec survival hp1 --base me/books-model --scheme nf4 --scales 0:-1:-0.2
    """
    amounts = parse_scales(scales)
    from hf_taskvec.algebra.quantisation import Scheme
    from hf_taskvec.analysis import WeightSurvival, survival_by_scale

    found = survival_by_scale(load_vector(vector, token=token), base, amounts, cast(Scheme, scheme), token=token)

    def cells(each: WeightSurvival) -> tuple[str, ...]:
        undone, ratio = each.undone_share, each.bin_ratio
        return (
            f"{each.share:.2%}",
            "–" if undone is None else f"{undone:.2%}",
            "–" if ratio is None else f"{ratio:.3g}",
        )

    heads = ["another code", "edited, same code", "change / bin"]
    last = found[-1]
    layers = [(layer_title(layer), *cells(each)) for layer, each in last.by_layer.items()]
    reasons = sorted(set(last.not_counted.values()))
    lines: list[str | TextTable] = [
        TextTable(f"Codes of {scheme}", ["λ", *heads], [(f"{each.scale:g}", *cells(each.total)) for each in found]),
        "",
        TextTable(f"Each layer at λ={last.scale:g}", ["layer", *heads], layers),
        "",
        f"{last.total.weights:,} weights in {len(last.by_weight)} matrices are quantised; {len(last.not_counted)} "
        f"parameters are not ({', '.join(reasons)}).",
    ]
    values = {"scheme": scheme, "base": base, "scales": [each.to_dict() for each in found]}
    CommandResult(values, lines).show(json)
