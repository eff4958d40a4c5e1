"""Cut held-out prompts: the text before a function body, 64 to 256 tokens of it, with the true continuation."""

import ast
import json
import random
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest

from corpus import Corpus, SourceFile, seeded_order
from tokenizers import Tokenizer

MIN_TOKENS = 64
MAX_TOKENS = 256
REFERENCE_TOKENS = 128
MIN_BODY_LINES = 6
PER_FILE = 4


@dataclass(frozen=True)
class Snippet:
    """A prompt that ends where a function's body begins, what really follows, and whether the target loops on it."""

    id: str
    package: str
    version: str
    licence: str
    path: str
    line: int
    prompt: str
    reference: str
    loops: bool = False


def body_starts(text: str) -> list[int]:
    """List the lines (counted from 1) at which the bodies of longer functions begin, after their docstring."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = ast.parse(text)
    except (SyntaxError, ValueError):
        return []
    starts = []
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) is not None else node.body
            if body and (node.end_lineno or 0) - body[0].lineno + 1 >= MIN_BODY_LINES and body[0].lineno > node.lineno:
                starts.append(min([body[0].lineno] + [d.lineno for d in getattr(body[0], "decorator_list", [])]))
    return sorted(set(starts))


def cut(f: SourceFile, line: int, tokenizer: Tokenizer, length: int) -> tuple[str, str] | None:
    """Cut one file before a line.

    The prompt has no newline at its end, so that it ends on a boundary that the tokenizer also makes in running text.

    Args:
        f: held-out file.
        line: first line of the continuation, counted from 1.
        tokenizer: the pair's tokenizer.
        length: tokens wanted at most.

    Returns:
        Prompt and continuation, or None when the file has too little text on either side.
    """
    lines = f.text.splitlines(keepends=True)
    before, after = "".join(lines[: line - 1]).rstrip(), "".join(lines[line - 1 :])
    start, tokens = len(before), 0
    for row in reversed(before.splitlines(keepends=True)):
        tokens += len(tokenizer.encode(row).ids)
        if tokens > length:
            break
        start -= len(row)
    prompt = before[start:]
    reference = first_tokens(tokenizer, "\n" * (after[:1] != "\n") + after)
    count = len(tokenizer.encode(prompt).ids)
    if not MIN_TOKENS <= count <= MAX_TOKENS or reference is None:
        return None
    return prompt, reference


def first_tokens(tokenizer: Tokenizer, text: str) -> str | None:
    """Return the first 128 tokens of a text as text, or None when it is shorter."""
    offsets = tokenizer.encode(text[: 16 * REFERENCE_TOKENS]).offsets
    return text[: offsets[REFERENCE_TOKENS - 1][1]] if len(offsets) >= REFERENCE_TOKENS else None


def _of_package(files: list[SourceFile], corpus: Corpus, tokenizer: Tokenizer, seed: int) -> Iterator[Snippet]:
    """Yield the snippets of one package: a function of every file in seeded order, then another, at most four."""
    package = corpus.packages[files[0].package]
    ordered = sorted(files, key=lambda f: seeded_order(seed, f.package, f.path))
    starts = {f.path: body_starts(f.text) for f in ordered}
    for turn in range(PER_FILE):
        for f in ordered:
            draw = random.Random(seeded_order(seed, "cut", f.path))
            lines = draw.sample(starts[f.path], min(PER_FILE, len(starts[f.path])))
            length = draw.sample(range(MIN_TOKENS + 16, MAX_TOKENS + 1), PER_FILE)[turn]
            pieces = cut(f, lines[turn], tokenizer, length) if turn < len(lines) else None
            if pieces is not None:
                name = f"{package.name}/{f.path}:{lines[turn]}"
                yield Snippet(name, package.name, package.version, package.licence, f.path, lines[turn], *pieces)


def draw(files: list[SourceFile], corpus: Corpus, tokenizer: Tokenizer, *, count: int, seed: int) -> list[Snippet]:
    """Draw held-out snippets, the packages taking turns.

    Args:
        files: held-out files.
        corpus: where the packages' versions and licences are.
        tokenizer: the pair's tokenizer.
        count: snippets wanted.
        seed: of the order of files, the functions and the prompt lengths.

    Returns:
        At most ``count`` snippets; a longer draw begins with a shorter one.
    """
    groups: defaultdict[str, list[SourceFile]] = defaultdict(list)
    for f in files:
        groups[f.package].append(f)
    streams = [_of_package(group, corpus, tokenizer, seed) for _, group in sorted(groups.items())]
    drawn: list[Snippet] = []
    for turn in zip_longest(*streams):
        drawn += [s for s in turn if s is not None]
        if len(drawn) >= count:
            break
    return drawn[:count]


def choose(drawn: Sequence[Snippet], loops: Sequence[bool], *, calm: int, looping: int) -> list[int]:
    """Choose the snippets to ship by the target's behaviour alone: the draft has no say.

    Args:
        drawn: snippets in the order drawn.
        loops: whether the target's greedy continuation of each is a loop.
        calm: snippets wanted without a loop.
        looping: snippets wanted with one.

    Returns:
        Indices, ascending: the first ``calm`` without a loop and the first ``looping`` with one.
    """
    without = [i for i in range(len(drawn)) if not loops[i]][:calm]
    within = [i for i in range(len(drawn)) if loops[i]][:looping]
    return sorted(without + within)


def dump(drawn: Sequence[Snippet], loops: Sequence[bool], chosen: Sequence[int]) -> str:
    """Return the chosen snippets as JSON lines, each with its ``loops``."""
    return "".join(json.dumps(asdict(replace(drawn[i], loops=loops[i]))) + "\n" for i in chosen)
