"""Rouge-L, equal to `rouge_score` to the last bit and much faster.

`rouge_score` fills an n×m table in Python and stems every word anew. Here the words become small ints, their
longest common subsequence is found by rapidfuzz's bit-parallel routine, and each word is stemmed once.
"""

from dataclasses import dataclass

from rapidfuzz.distance import LCSseq

from hf_taskvec.evaluation.texts.word_tokens import words


@dataclass(frozen=True)
class RougeScore:
    """Precision, recall and F1 of one prediction against one reference, each between 0 and 1.

    Args:
        precision (`float`):
            The share of the generated words in the longest common subsequence.
        recall (`float`):
            The share of the true words in it.
        fmeasure (`float`):
            Their harmonic mean.
    """

    precision: float
    recall: float
    fmeasure: float


def rouge_l(prediction: str, reference: str, stemmer: bool = False) -> RougeScore:
    """The Rouge-L precision, recall and F1 of `prediction`, bit for bit those of `rouge_score`.

    Args:
        prediction (`str`):
            The generated text.
        reference (`str`):
            The true text.
        stemmer (`bool`, *optional*, defaults to `False`):
            Compare Porter stems, as `RougeScorer(use_stemmer=True)` does.

    Returns:
        `RougeScore`: All 0 if one of the texts has no words.

    Example:
        >>> rouge_l("the cat sat", "the cat sat on the mat").recall
        0.5

    """
    predicted, true = words(prediction, stemmer), words(reference, stemmer)
    if not predicted or not true:
        return RougeScore(0.0, 0.0, 0.0)
    ids: dict[str, int] = {}
    left = [ids.setdefault(word, len(ids)) for word in true]
    right = [ids.setdefault(word, len(ids)) for word in predicted]
    common = LCSseq.similarity(left, right)
    precision, recall = common / len(right), common / len(left)
    # Written as rouge_score writes it: another order of the operations would round differently.
    fmeasure = 2 * precision * recall / (precision + recall) if precision + recall > 0 else 0.0
    return RougeScore(precision, recall, fmeasure)


def pypi_rouge_l(prediction: str, reference: str) -> RougeScore:
    """What the PyPI package `rouge` 1.0.1 calls rouge-l: summary level, over *sets* of words.

    SSU's first version reports it. A word counts once however often it occurs, "sentences" end at each full
    stop, case and punctuation count. It is not comparable with `rouge_l`, hence its own name.
    """
    predicted = [sentence.split() for sentence in prediction.split(".") if sentence]
    true = [sentence.split() for sentence in reference.split(".") if sentence]
    # `rouge` splits " ".join(...) at single spaces, so an all-blank sentence holds one word: the empty one.
    predicted = [sentence or [""] for sentence in predicted]
    true = [sentence or [""] for sentence in true]
    if not predicted or not true:
        return RougeScore(0.0, 0.0, 0.0)  # `rouge` raises here
    union: set[str] = set()
    for sentence in true:
        for other in predicted:
            union.update(_one_lcs(sentence, other))
    recall = len(union) / len({word for sentence in true for word in sentence})
    precision = len(union) / len({word for sentence in predicted for word in sentence})
    return RougeScore(precision, recall, 2.0 * ((precision * recall) / (precision + recall + 1e-8)))


def _one_lcs(left: list[str], right: list[str]) -> list[str]:
    """The words of one longest common subsequence; among equals the one that `rouge` walks back to."""
    rows, columns = len(left), len(right)
    table = [[0] * (columns + 1) for _ in range(rows + 1)]
    for i, word in enumerate(left):
        above, here = table[i], table[i + 1]
        for j, other in enumerate(right):
            here[j + 1] = above[j] + 1 if word == other else max(above[j + 1], here[j])
    found, i, j = [], rows, columns
    while i and j:
        if left[i - 1] == right[j - 1]:
            found.append(left[i - 1])
            i, j = i - 1, j - 1
        elif table[i - 1][j] > table[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return found
