"""From scores of words to words, and how many of them are wrong."""

from collections.abc import Iterable, Sequence

import numpy as np


def greedy(scores: np.ndarray, padding: np.ndarray) -> list[list[int]]:
    """The best label at each position of each utterance, where repetitions count once and blanks are left out."""
    found = list[list[int]]()
    for best, padded in zip(np.asarray(scores).argmax(-1), np.asarray(padding), strict=True):
        best = best[padded == 0]
        starts = np.append(True, best[1:] != best[:-1])[: len(best)]
        found.append([int(label) for label in best[starts] if label])
    return found


def distance(found: Sequence[int], spoken: Sequence[int]) -> int:
    """The least number of words to insert, to leave out or to replace."""
    row = list(range(len(spoken) + 1))
    for i, word in enumerate(found, 1):
        last, row[0] = row[0], i
        for j, other in enumerate(spoken, 1):
            last, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, last + (word != other))
    return row[-1]


def word_error_rate(found: Iterable[Sequence[int]], spoken: Iterable[Sequence[int]]) -> float:
    """Wrong words in percent of those that were spoken."""
    pairs = list(zip(found, spoken, strict=True))
    return 100 * sum(distance(*pair) for pair in pairs) / sum(len(each) for _, each in pairs)
