"""Decide whether installed Python source may be trained on, from its licence metadata and from its own header."""

import re
from email.message import Message
from typing import NamedTuple

# SPDX identifiers of permissive licences. "BSD" stands for metadata that names the family without the clause count.
ALLOWED = frozenset(
    (
        "MIT",
        "MIT-0",
        "MIT-CMU",
        "BSD",
        "BSD-2-Clause",
        "BSD-3-Clause",
        "0BSD",
        "Apache-2.0",
        "ISC",
        "PSF-2.0",
        "Python-2.0",
        "Unlicense",
        "Zlib",
        "CC0-1.0",
        "BSL-1.0",
    )
)

_CLASSIFIERS = {
    "MIT License": "MIT",
    "MIT No Attribution License (MIT-0)": "MIT-0",
    "BSD License": "BSD",
    "Zero-Clause BSD (0BSD)": "0BSD",
    "Apache Software License": "Apache-2.0",
    "ISC License (ISCL)": "ISC",
    "Python Software Foundation License": "PSF-2.0",
    "The Unlicense (Unlicense)": "Unlicense",
    "zlib/libpng License": "Zlib",
    "CC0 1.0 Universal (CC0 1.0) Public Domain Dedication": "CC0-1.0",
}

_TITLES = (
    (re.compile(r"\bmit\b", re.I), "MIT"),
    (re.compile(r"\bapache\b(?!.*\b1\.[01]\b)", re.I), "Apache-2.0"),
    (re.compile(r"\b0bsd\b", re.I), "0BSD"),
    (re.compile(r"\bbsd\b", re.I), "BSD"),
    (re.compile(r"\bisc\b", re.I), "ISC"),
    (re.compile(r"\bpsf|python software foundation", re.I), "PSF-2.0"),
    (re.compile(r"\bunlicense\b", re.I), "Unlicense"),
    (re.compile(r"\bzlib\b", re.I), "Zlib"),
)

_FOREIGN = re.compile(
    r"\b[AL]?GPL\b|\b[AL]?GPL[- ]?v?\d|general public licen[cs]e|mozilla public|\bMPL[- ]?v?\d|eclipse public"
    r"|creative commons attr|\bCC[- ]BY|\bEPL[- ]\d|\bCDDL\b|\bEUPL\b|\bCeCILL\b|business source licen[cs]e"
    r"|\bproprietary\b|\bconfidential\b|non-?commercial|\bEULA\b|strictly prohibited",
    re.I,
)
_SPDX_LINE = re.compile(r"SPDX-License-Identifier:\s*([^\n*\"']+)", re.I)
_HEADER_CHARS = 4096


class Verdict(NamedTuple):
    """What the metadata of one distribution says: its licence, the field that said so, and whether it is allowed."""

    licence: str
    field: str
    allowed: bool


def spdx_allowed(expression: str) -> bool:
    """Evaluate an SPDX expression: AND needs both sides allowed, OR one of them, WITH its licence.

    Args:
        expression: SPDX licence expression, e.g. ``"BSD-3-Clause AND (MIT OR GPL-2.0-only)"``.

    Returns:
        Whether the whole expression can be met by allowed licences alone; malformed expressions are not allowed.
    """
    tokens = re.findall(r"[()]|[^\s()]+", expression)
    position = 0

    def peek() -> str:
        return tokens[position] if position < len(tokens) else ""

    def take() -> str:
        nonlocal position
        position += 1
        return tokens[position - 1] if position <= len(tokens) else ""

    def term() -> bool:
        if peek() == "(":
            take()
            inside = either()
            return take() == ")" and inside
        allowed = take() in ALLOWED
        if peek().upper() == "WITH":
            take()
            take()
        return allowed

    def both() -> bool:
        allowed = term()
        while peek().upper() == "AND":
            take()
            allowed = term() and allowed
        return allowed

    def either() -> bool:
        allowed = both()
        while peek().upper() == "OR":
            take()
            allowed = both() or allowed
        return allowed

    return bool(tokens) and either() and position == len(tokens)


def judge(metadata: Message) -> Verdict:
    """Read the licence of a distribution from License-Expression, else the classifiers, else the License field.

    A package without an expression is refused when any of the other fields names a licence outside ``ALLOWED``.

    Args:
        metadata: core metadata, as ``importlib.metadata.Distribution.metadata``.

    Returns:
        The verdict; ``licence`` is ``"unknown"`` when nothing could be read.
    """
    expression = metadata.get("License-Expression")
    if expression:
        return Verdict(expression, "License-Expression", spdx_allowed(expression))
    text = metadata.get("License") or ""
    leaves = [
        c.split(" :: ")[-1]
        for c in metadata.get_all("Classifier") or []
        if c.startswith("License ::") and c != "License :: OSI Approved"
    ]
    if _FOREIGN.search(text):
        return Verdict(text.strip().splitlines()[0][:60], "License", False)
    if leaves:
        names = [_CLASSIFIERS.get(leaf, leaf) for leaf in leaves]
        return Verdict(" AND ".join(sorted(set(names))), "Classifier", all(n in ALLOWED for n in names))
    title = text.strip()[:200]
    if spdx_allowed(title):
        return Verdict(title, "License", True)
    for pattern, name in _TITLES:
        if pattern.search(title):
            return Verdict(name, "License", True)
    return Verdict(title.splitlines()[0][:60] if title else "unknown", "License", False)


def foreign_header(text: str) -> bool:
    """Return whether the head of a source file names a licence other than the permissive ones.

    Args:
        text: the file; only its first 4096 characters are read.
    """
    head = text[:_HEADER_CHARS]
    if any(not spdx_allowed(match.strip()) for match in _SPDX_LINE.findall(head)):
        return True
    return _FOREIGN.search(head) is not None
