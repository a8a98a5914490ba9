"""Rouge-L on 512-word passages with stemming: rouge_score and ours, in one run.

python tests/benchmarks/bench_evaluation_rouge.py path/to/book.txt
"""

import sys
import time
from pathlib import Path

from rouge_score.rouge_scorer import RougeScorer

from hf_taskvec.evaluation import rouge_l
from hf_taskvec.evaluation.texts.word_tokens import _stem


def main(book: str) -> None:
    found = Path(book).read_text(encoding="utf-8").split()
    starts = range(1000, min(len(found) - 812, 60000), 1000)
    pairs = [(" ".join(found[i : i + 512]), " ".join(found[i + 300 : i + 812])) for i in starts]
    peer = RougeScorer(["rougeL"], use_stemmer=True)
    rouge_l("warm up", "the stemmer", stemmer=True)
    _stem.cache_clear()

    begin = time.perf_counter()
    theirs = [peer.score(reference, prediction)["rougeL"].fmeasure for prediction, reference in pairs]
    middle = time.perf_counter()
    cold = [rouge_l(prediction, reference, stemmer=True).fmeasure for prediction, reference in pairs]
    late = time.perf_counter()
    warm = [rouge_l(prediction, reference, stemmer=True).fmeasure for prediction, reference in pairs]
    end = time.perf_counter()
    assert theirs == cold == warm, "the scores differ"
    peer_time, cold_time, warm_time = middle - begin, late - middle, end - late
    print(f"{len(pairs)} pairs of 512 words, stemmed; identical scores")
    print(f"rouge_score        {1e3 * peer_time / len(pairs):8.3f} ms/pair")
    print(f"ours, no stem yet  {1e3 * cold_time / len(pairs):8.3f} ms/pair   {peer_time / cold_time:6.1f}×")
    print(f"ours, stems known  {1e3 * warm_time / len(pairs):8.3f} ms/pair   {peer_time / warm_time:6.1f}×")


if __name__ == "__main__":
    main(sys.argv[1])
