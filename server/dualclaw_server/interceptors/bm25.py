"""Okapi BM25 over small sets of short texts, and the words of names, sentences and Chinese.

Words: names are split at underscores, hyphens and changes of case ("getWeather_v2" is get, weather, v2); what is
written without blanks (Chinese, Japanese, Korean) is cut into pairs of characters; everything is lower-case.
A plural "s" is dropped, so that "files" finds "file".
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

_K1 = 1.2
"""How soon more of the same word stops counting."""
_B = 0.75
"""How much long texts are held against themselves."""
_DENSE = r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af]"
_PIECE = re.compile(rf"(?P<dense>{_DENSE}+)|(?:(?!{_DENSE})[^\W\d_])+\d*|\d+")
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_SHORTEST_PLURAL = 4


def words(text: str) -> Iterator[str]:
    """Yield the words of a text or a name, repeated ones too."""
    for match in _PIECE.finditer(text):
        piece = match[0]
        if match["dense"]:
            yield from (piece[i : i + 2] for i in range(max(1, len(piece) - 1)))
            continue
        for word in map(str.lower, _CAMEL.split(piece)):
            plural = len(word) >= _SHORTEST_PLURAL and word.endswith("s") and not word.endswith("ss")
            yield word[:-1] if plural else word


class Bm25:
    """An index of documents, each a sequence of words. Immutable."""

    def __init__(self, documents: Sequence[Iterable[str]]) -> None:
        counts = [Counter(document) for document in documents]
        lengths = [sum(count.values()) for count in counts]
        average = sum(lengths) / len(lengths) if lengths else 1.0
        self._size = len(counts)
        weights: dict[str, list[tuple[int, float]]] = {}
        for place, count in enumerate(counts):
            norm = _K1 * (1 - _B + _B * lengths[place] / (average or 1.0))
            for word, times in count.items():
                weights.setdefault(word, []).append((place, times * (_K1 + 1) / (times + norm)))
        self._weights: Mapping[str, list[tuple[int, float]]] = weights

    def scores(self, query: Iterable[str]) -> list[float]:
        """Return how well each document fits, in their order; 0 for one that shares no word with the query."""
        scores = [0.0] * self._size
        for word in sorted(set(query)):  # in one order, for sums of floats depend on it
            found = self._weights.get(word, ())
            rarity = math.log(1 + (self._size - len(found) + 0.5) / (len(found) + 0.5))
            for place, weight in found:
                scores[place] += rarity * weight
        return scores
