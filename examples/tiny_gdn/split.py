"""Hold whole packages out of training, and check that nothing of them is left on the training side."""

from collections import Counter, defaultdict
from dataclasses import dataclass

import dedup
import numpy as np
from corpus import Corpus, SourceFile, seeded_order

MIN_HELD_OUT_BYTES = 300_000
MAX_HELD_OUT_BYTES = 3_000_000
MAX_CONTAINMENT = 0.2


@dataclass(frozen=True)
class Split:
    """Training files, held-out files, and what the check across the split removed."""

    train: list[SourceFile]
    held_out: list[SourceFile]
    held_out_packages: list[str]
    removed_train: int
    removed_held_out: int


def choose_packages(files: list[SourceFile], count: int, seed: int) -> list[str]:
    """Choose the held-out packages: the first ``count`` in seeded order among those of 0.3 to 3 MB.

    Args:
        files: all files kept.
        count: packages to hold out.
        seed: of the order.

    Returns:
        Package names, sorted.
    """
    sizes: Counter[str] = Counter()
    for f in files:
        sizes[f.package] += f.num_bytes
    eligible = [p for p, size in sizes.items() if MIN_HELD_OUT_BYTES <= size <= MAX_HELD_OUT_BYTES]
    return sorted(sorted(eligible, key=lambda p: seeded_order(seed, p))[:count])


def split(corpus: Corpus, *, count: int, seed: int) -> Split:
    """Split a corpus by package.

    Near-duplicates are already gone from the whole corpus. Across the split two stricter rules apply: a training file
    under a directory or module named like a held-out package is dropped, and so is a held-out file more than a fifth of
    whose three-line shingles occur in training.

    Args:
        corpus: the corpus.
        count: packages to hold out.
        seed: of the choice.

    Returns:
        The split.
    """
    chosen = set(choose_packages(corpus.files, count, seed))
    by_side: defaultdict[bool, list[SourceFile]] = defaultdict(list)
    for f in corpus.files:
        by_side[f.package in chosen].append(f)
    import_names = {f.path.split("/")[0].removesuffix(".py") for f in by_side[True]} - {"tests", "test", "docs"}
    train = [f for f in by_side[False] if not import_names & set(f.path.removesuffix(".py").split("/"))]
    known = np.unique(np.concatenate([f.shingles for f in train]))
    held_out = [f for f in by_side[True] if dedup.containment(f.shingles, known) <= MAX_CONTAINMENT]
    return Split(
        train=train,
        held_out=held_out,
        held_out_packages=sorted({f.package for f in held_out}),
        removed_train=len(by_side[False]) - len(train),
        removed_held_out=len(by_side[True]) - len(held_out),
    )
