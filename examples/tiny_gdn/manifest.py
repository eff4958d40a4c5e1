"""Write down what was trained on: packages, licences, file hashes, and the licence texts of the held-out packages."""

import hashlib
import json
import lzma
from collections import defaultdict
from importlib import metadata
from pathlib import Path
from typing import Any

from corpus import Corpus, SourceFile
from split import Split


def tree_hash(files: list[SourceFile]) -> str:
    """Return the SHA-256 over the sorted SHA-256 hashes of some files."""
    return hashlib.sha256("\n".join(sorted(f.sha256 for f in files)).encode()).hexdigest()


def summarise(corpus: Corpus, division: Split) -> dict[str, Any]:
    """Summarise a corpus: one entry a package and side, totals, and what was left out.

    Args:
        corpus: the corpus after all filters.
        division: its split.

    Returns:
        A JSON-serialisable manifest.
    """
    packages = []
    for side, files in (("train", division.train), ("held_out", division.held_out)):
        groups: defaultdict[str, list[SourceFile]] = defaultdict(list)
        for f in files:
            groups[f.package].append(f)
        for name, group in sorted(groups.items()):
            package = corpus.packages[name]
            packages.append(
                {
                    "name": name,
                    "version": package.version,
                    "licence": package.licence,
                    "licence_field": package.licence_field,
                    "split": side,
                    "files": len(group),
                    "bytes": sum(f.num_bytes for f in group),
                    "sha256_of_sorted_sha256": tree_hash(group),
                }
            )
    return {
        "scanned": {"files": corpus.scanned_files, "bytes": corpus.scanned_bytes},
        "train": {"files": len(division.train), "bytes": sum(f.num_bytes for f in division.train)},
        "held_out": {"files": len(division.held_out), "bytes": sum(f.num_bytes for f in division.held_out)},
        "left_out_files": {
            **corpus.refused_files,
            "names a held-out package": division.removed_train,
            "held out, but contained in training": division.removed_held_out,
        },
        "refused_packages": corpus.refused_packages,
        "packages": packages,
    }


def write(corpus: Corpus, division: Split, out: Path) -> dict[str, Any]:
    """Write ``manifest.json``, ``manifest_files.tsv.xz`` and ``held_out_licences.txt``.

    The per-file list has one line a file: split, package, path, and the first 128 bits of the file's SHA-256.

    Args:
        corpus: the corpus after all filters.
        division: its split.
        out: directory to write into.

    Returns:
        The manifest.
    """
    summary = summarise(corpus, division)
    (out / "manifest.json").write_text(json.dumps(summary, indent=1) + "\n")
    rows = [
        f"{side}\t{f.package}\t{f.path}\t{f.sha256[:32]}\n"
        for side, files in (("train", division.train), ("held_out", division.held_out))
        for f in files
    ]
    (out / "manifest_files.tsv.xz").write_bytes(lzma.compress("".join(rows).encode(), preset=9))
    (out / "held_out_licences.txt").write_text("\n".join(_licence_text(name) for name in division.held_out_packages))
    return summary


def _licence_text(name: str) -> str:
    """Return the licence files that a distribution ships, under a heading."""
    dist = metadata.distribution(name)
    rule = "=" * 80
    texts = [
        Path(str(dist.locate_file(f))).read_text(encoding="utf-8", errors="replace")
        for f in dist.files or []
        if ".dist-info" in f.parts[0]
        and f.stem.upper().startswith(("LICENSE", "LICENCE", "COPYING", "NOTICE", "AUTHORS"))
    ]
    heading = f"{rule}\n{name} {dist.version}\n{rule}\n"
    return heading + "\n".join(texts or ["(the distribution ships no licence file)\n"])
