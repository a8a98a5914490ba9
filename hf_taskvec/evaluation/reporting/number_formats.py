"""Numbers as tables show them: a true minus sign, intervals in square brackets, changes in percent or as factors."""

from hf_taskvec.evaluation.scoring.statistics import Interval


def format_number(value: float, digits: int | None = None, sign: bool = False) -> str:
    """A number with so many digits after the point, or as short as it goes.

    >>> format_number(-0.5), format_number(0.25, 3, sign=True)
    ('−0.5', '+0.250')
    """
    form = "+" if sign else ""
    if abs(value) >= 1e5:
        digits, value = None, float(f"{value:.3g}")  # a broken model's perplexity
    elif digits is not None:
        value = round(value, digits) + 0.0  # there is no −0
    text = format(value, f"{form}g") if digits is None else format(value, f"{form}.{digits}f")
    return text.replace("-", "−")


def format_interval(found: Interval, digits: int, sign: bool = False) -> str:
    """An estimate with its interval, which is left out where every passage has the same value.

    >>> format_interval(Interval(0.5, 0.4, 0.6), 2)
    '0.50 [0.40, 0.60]'
    """
    value = format_number(found.value, digits, sign)
    if found.low == found.high == found.value:
        return value
    return f"{value} [{format_number(found.low, digits)}, {format_number(found.high, digits)}]"


def format_share(change: Interval) -> str:
    """A relative change: in percent, or as factors where one of the numbers is beyond tenfold.

    >>> format_share(Interval(-0.5, -0.6, -0.4)), format_share(Interval(19.0, 19.0, 19.0))
    ('−50.00 % [−60.00 %, −40.00 %]', '×20')
    """
    form = _factor if change.high >= 9 else _percent
    if change.low == change.high == change.value:
        return form(change.value)
    return f"{form(change.value)} [{form(change.low)}, {form(change.high)}]"


def _percent(share: float) -> str:
    return f"{100 * share + 0.0:+.2f} %".replace("-", "−")  # + 0.0: there is no −0 %


def _factor(share: float) -> str:
    factor = 1 + share
    return f"×{factor:.0f}" if factor >= 1000 else f"×{factor:.3g}"
