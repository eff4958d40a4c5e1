"""Collect permissively licensed Python source from the running environment, without vendored copies and duplicates."""

import hashlib
import re
import sysconfig
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from email.message import Message
from importlib import metadata
from multiprocessing import get_context
from pathlib import Path
from platform import python_version
from typing import cast

import dedup
import licences

MIN_BYTES = 256
MAX_BYTES = 200_000
MAX_LINE = 500
VENDORED = frozenset(
    (
        "_vendor",
        "vendor",
        "vendored",
        "_vendored",
        "third_party",
        "thirdparty",
        "3rdparty",
        "extern",
        "_extern",
        "externals",
        "_externals",
        "external",
        "_external",
        "bundled",
        "_bundled",
    )
)
DATA_LIKE = frozenset(("testdata", "test_data", "fixtures", "snapshots"))
SKIPPED_PACKAGES = frozenset({"treewy"})
_GENERATED = re.compile(
    r"(?:automatically|auto-?|machine)[ -]?generated|generated (?:by|from|with|automatically|code)"
    r"|do not edit|@generated",
    re.I,
)


@dataclass(frozen=True)
class Package:
    """A distribution that may be used."""

    name: str
    version: str
    licence: str
    licence_field: str


@dataclass(frozen=True)
class SourceFile:
    """One file that passed the filters; ``path`` is relative to the root its distribution is installed in."""

    package: str
    path: str
    text: str
    num_bytes: int
    sha256: str
    normal_hash: bytes
    shingles: dedup.Shingles
    signature: dedup.Signature


@dataclass(frozen=True)
class Corpus:
    """Files kept after all filters, the packages they come from, and what was left out and why."""

    packages: dict[str, Package]
    files: list[SourceFile]
    refused_packages: dict[str, str]
    refused_files: dict[str, int]
    scanned_files: int
    scanned_bytes: int


@dataclass(frozen=True)
class Found:
    """A file before it is read; ``vendored`` if a folder of its path says that it is a copy of another package."""

    package: str
    path: str
    absolute: str
    vendored: bool


def canonical(name: str) -> str:
    """Return the canonical name of a distribution."""
    return re.sub(r"[-_.]+", "-", name).lower()


def folders(path: str) -> set[str]:
    """Return the names of the folders in a relative path, in lower case."""
    return set(path.lower().split("/")[:-1])


def installed() -> tuple[dict[str, Package], dict[str, str], list[Found]]:
    """List the Python files of every allowed distribution and of the standard library.

    Returns:
        Packages by name, refused packages with the licence that refused them, and the files, each in sorted order.
    """
    packages: dict[str, Package] = {}
    refused: dict[str, str] = {}
    found: list[Found] = []
    distributions = {canonical(d.name): d for d in reversed(list(metadata.distributions()))}
    for name, dist in distributions.items():
        if name in SKIPPED_PACKAGES:
            continue
        verdict = licences.judge(cast(Message, dist.metadata))
        if not verdict.allowed:
            refused[name] = verdict.licence
            continue
        paths = sorted({str(f) for f in dist.files or [] if f.suffix == ".py" and ".." not in f.parts})
        copies = VENDORED | {"_" + other.replace("-", "_") for other in distributions if other != name}
        if paths:
            packages[name] = Package(name, dist.version, verdict.licence, verdict.field)
            found += [Found(name, p, str(dist.locate_file(p)), not copies.isdisjoint(folders(p))) for p in paths]
    root = Path(sysconfig.get_path("stdlib"))
    packages["python"] = Package("python", python_version(), "PSF-2.0", "standard library")
    library = (p for p in root.rglob("*.py") if not {"site-packages", "dist-packages"} & set(p.parts))
    found += [Found("python", p.relative_to(root).as_posix(), str(p), False) for p in library]
    return (
        dict(sorted(packages.items())),
        dict(sorted(refused.items())),
        sorted(found, key=lambda f: (f.package, f.path)),
    )


def reason_to_skip(path: str, text: str) -> str | None:
    """Return why a file is left out, or None when it is kept."""
    parts = folders(path)
    if parts & DATA_LIKE or ({"test", "tests"} & parts and "data" in parts):
        return "test data"
    if len(text) < MIN_BYTES:
        return "too small"
    head = text[:2048]
    if _GENERATED.search(head):
        return "generated"
    if licences.foreign_header(text):
        return "another licence in the header"
    lines = text.splitlines()
    if max(map(len, lines)) > MAX_LINE or len(text) / len(lines) > 100:
        return "long lines"
    letters = sum(map(str.isalpha, text[:20_000]))
    digits = sum(map(str.isdigit, text[:20_000]))
    if letters < 0.4 * len(text[:20_000]) or digits > 0.15 * len(text[:20_000]):
        return "data, not code"
    return None


def scan(found: Found) -> SourceFile | tuple[str, int]:
    """Read and filter one file.

    Returns:
        The file with its hashes, or the reason it is left out and its size in bytes.
    """
    if found.vendored:
        return "vendored copy", 0
    try:
        raw = Path(found.absolute).read_bytes()
    except OSError:
        return "unreadable", 0
    if len(raw) > MAX_BYTES:
        return "too large", len(raw)
    try:
        text = raw.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError:
        return "not UTF-8", len(raw)
    reason = reason_to_skip(found.path, text)
    lines = dedup.normalise(text)
    if reason is None and len(lines) < 5:
        reason = "too small"
    if reason is not None:
        return reason, len(raw)
    shingles = dedup.shingle(lines)
    return SourceFile(
        package=found.package,
        path=found.path,
        text=text,
        num_bytes=len(raw),
        sha256=hashlib.sha256(raw).hexdigest(),
        normal_hash=hashlib.blake2b("\n".join(lines).encode(), digest_size=16).digest(),
        shingles=shingles,
        signature=dedup.signature(shingles),
    )


def seeded_order(seed: int, *names: str) -> str:
    """Return a key that sorts names in a random but reproducible order."""
    return hashlib.sha256(f"{seed}:{'/'.join(names)}".encode()).hexdigest()


def _unique(files: list[SourceFile], reasons: Counter[str]) -> list[SourceFile]:
    """Drop files whose normalised text, or most of whose shingles, occurred before."""
    seen: set[bytes] = set()
    exact = []
    for f in files:
        if f.normal_hash not in seen:
            seen.add(f.normal_hash)
            exact.append(f)
    reasons["exact duplicate"] += len(files) - len(exact)
    repeats = dedup.near_duplicates([f.shingles for f in exact], [f.signature for f in exact])
    kept = [f for f, repeat in zip(exact, repeats, strict=True) if repeat < 0]
    reasons["near-duplicate"] += len(exact) - len(kept)
    return kept


def _capped(files: list[SourceFile], cap_bytes: int, seed: int, reasons: Counter[str]) -> Iterator[SourceFile]:
    """Keep a seeded sample of at most ``cap_bytes`` of each package."""
    used: Counter[str] = Counter()
    for f in sorted(files, key=lambda f: seeded_order(seed, f.package, f.path)):
        if used[f.package] + f.num_bytes <= cap_bytes:
            used[f.package] += f.num_bytes
            yield f
        else:
            reasons["over the package's cap"] += 1


def build(*, cap_bytes: int, seed: int, workers: int, max_files: int | None = None) -> Corpus:
    """Build the corpus: list, filter, remove duplicates, cap each package.

    Args:
        cap_bytes: most bytes kept of one package.
        seed: of the sample that a capped package keeps.
        workers: processes that read files.
        max_files: read only a seeded sample of this many files (for a smoke run).

    Returns:
        The corpus, files sorted by package and path.
    """
    packages, refused, found = installed()
    if max_files is not None:
        found = sorted(found, key=lambda f: seeded_order(seed, f.package, f.path))[:max_files]
        found.sort(key=lambda f: (f.package, f.path))
    reasons: Counter[str] = Counter()
    kept: list[SourceFile] = []
    scanned_bytes = 0
    with ProcessPoolExecutor(workers, mp_context=get_context("fork")) as pool:
        for result in pool.map(scan, found, chunksize=64):
            if isinstance(result, SourceFile):
                kept.append(result)
                scanned_bytes += result.num_bytes
            else:
                reasons[result[0]] += 1
                scanned_bytes += result[1]
    kept = _unique(kept, reasons)
    kept = sorted(_capped(kept, cap_bytes, seed, reasons), key=lambda f: (f.package, f.path))
    names = {f.package for f in kept}
    return Corpus(
        packages={n: p for n, p in packages.items() if n in names},
        files=kept,
        refused_packages=refused,
        refused_files=dict(reasons.most_common()),
        scanned_files=len(found),
        scanned_bytes=scanned_bytes,
    )
