"""The ways of generating that `end_to_end.py` compares, and the measurement of one."""

import importlib.util
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from _end_to_end_models import work
from _forced import ForcedDrafter
from torch import Tensor
from transformers import PreTrainedModel

import treewy
from treewy import AssistantDrafter, Drafter, DraftingContext, DraftTree
from treewy._draft_tree import parents_from_widths
from treewy.testing._bounds import Noise
from treewy.testing._tokens import TokenComparison

Rates = Mapping[tuple[int, ...], tuple[float, ...]]

CHAINS = {f"chain {depth}": (1,) * depth for depth in (3, 7)}
TREES = {str(widths).replace(" ", ""): widths for widths in ((2, 2, 2), (3, 2, 1, 1), (3, 3, 3))}
EQUAL_CHAINS = {f"chain {nodes}": (1,) * nodes for nodes in (14, 21, 39)}
"""As many nodes as each of the trees."""

REJECTED = {"chain 3": (1, 1, 1), "(3,3,3)": (3, 3, 3)}
FREE = ", drafting free"
WRONG = ", always wrong"
POLICIES = ("deferred", "snapshots")

_PASSES = 3
_ENOUGH = 2.0  # seconds; no further pass behind them
_LONG = 3.0  # seconds; a pass that takes so long needs no warm-up, beyond the preparation
_FEW_TOKENS = 24  # beside one tree, where a generation is not timed as a whole
_SMALL = 32  # nodes that stores of a first, smaller tree have room for


@dataclass(frozen=True)
class Way:
    """A way of generating.

    Args:
        name: Without the model and batch.
        engine: "eager", "static" and "fla" are Hugging Face's own; "ours" is compiled; a commit policy is our eager
            engine with that policy.
        tree: What is drafted.
        drafting: "model", the pair's draft model; "forced", as often right as that, and free; "charged", likewise, with
            a draft model that is run for what it costs; "wrong", never accepted, and free; "nothing".
        is_extra: Whether it comes last.
    """

    name: str
    engine: str
    tree: tuple[int, ...] = ()
    drafting: str = "nothing"
    is_extra: bool = False

    @property
    def is_ours(self) -> bool:
        """Whether rounds of ours are run."""
        return self.engine not in ("eager", "static", "fla")

    @property
    def has_draft_model(self) -> bool:
        """Whether a draft model is run."""
        return self.drafting in ("model", "charged")

    @property
    def process(self) -> int:
        """Which of two processes measures it.

        Rounds of one node and of few are compiled before larger ones, which would serve them too; and compiling takes
        half as long in two.
        """
        return int(self.engine not in ("eager", "ours") or len(_parents(self.tree)) >= _SMALL)


def ways(kind: str) -> list[Way]:
    """Return the ways for "pair" or "large", in the order in which they are prepared and measured."""
    found = [
        Way("eager", "eager"),
        Way("HF static compiled", "static"),
        Way("HF eager + fla", "fla"),
        Way("plain", "ours"),
    ]
    found += [Way(name + WRONG, "ours", tree, "wrong") for name, tree in REJECTED.items()]
    for shapes, is_extra in ((CHAINS | TREES, False), (EQUAL_CHAINS, True)):
        if kind == "large":
            found += [Way(name + FREE, "ours", tree, "forced", is_extra) for name, tree in shapes.items()]
        else:
            found += [Way(name, "ours", tree, "model", is_extra) for name, tree in shapes.items()]
    for shapes, is_extra in ((CHAINS | TREES, False), (EQUAL_CHAINS, True)):
        if kind == "large":
            found += [Way(name, "ours", tree, "charged", is_extra) for name, tree in shapes.items()]
    if kind == "pair":
        found += [
            Way(f"{name}{WRONG}, eager {policy}", policy, tree, "wrong", is_extra=True)
            for name, tree in REJECTED.items()
            for policy in POLICIES
        ]
    return sorted(found, key=lambda way: way.is_extra)


def refusal(way: Way) -> str | None:
    """Return why a way cannot be measured on this machine, if so."""
    has_fla = importlib.util.find_spec("fla") is not None
    if way.engine == "fla" and not has_fla:
        return "flash-linear-attention is not installed"
    if way.engine == "eager" and has_fla:
        return "flash-linear-attention is installed, and transformers uses it"
    return None


class WrongError(Exception):
    """Say why a way has no time."""


class Stopwatch(Drafter):
    """Draft as another one does, and note how long that takes and how long the rest of each round.

    It waits for the GPU, so that a generation that is timed as a whole must do without it.
    """

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self.drafting: list[float] = []  # seconds, by round
        self.verifying: list[float] = []

    def prepare(self, context: DraftingContext) -> None:
        """Pass on what the drafts are for."""
        if hasattr(self._drafter, "prepare"):
            self._drafter.prepare(context)

    def propose(self, input_ids: Tensor, lengths: Tensor) -> DraftTree:
        """Begin a round."""
        start = now()
        tree = self._drafter.propose(input_ids, lengths)
        self._proposed = now()
        self.drafting.append(self._proposed - start)
        return tree

    def update(self, token_ids: Tensor, num_tokens: Tensor) -> None:
        """End a round."""
        start = now()
        self.verifying.append(start - self._proposed)
        self._drafter.update(token_ids, num_tokens)
        self.drafting[-1] += now() - start

    def reset(self) -> None:
        """Begin a text."""
        self._drafter.reset()


def now() -> float:
    """Return the time when all that was launched is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


class Bench:
    """Measure ways of generating with one model and batch size.

    Args:
        kind: "pair" or "large".
        batch: Rows.
        quick: Tiny models on the CPU.
        rates: How often forced drafts are accepted, by tree and depth.
    """

    def __init__(self, kind: str, batch: int, quick: bool, rates: Rates) -> None:
        self._kind, self._batch, self._quick, self._rates = kind, batch, quick, rates
        self._work = work(kind, batch, quick=quick)
        self._models: dict[str, PreTrainedModel] = {}
        self._draft: PreTrainedModel | None = None
        self._drafters: dict[tuple[Way, int], Drafter] = {}
        self._broken: dict[Way, str] = {}
        every = range(len(self._work.prompts))
        self._expected = [self._new_tokens(number, self._generate(Way("eager", "eager"), number)) for number in every]

    def prepare(self, way: Way) -> None:
        """Compile, and remember what goes wrong: the other ways can do without."""
        if refusal(way) is None:
            try:
                few = way.has_draft_model or way.engine == "fla"
                for number in range(len(self._work.prompts)) if not few else [0]:
                    self._generate(way, number, new_tokens=_few_tokens(way) if few else None)
            except Exception as error:
                self._broken[way] = _first_line(error)

    def measure(self, way: Way) -> dict[str, Any]:
        """Time whole calls of ``generate``; of a way that fails or has other tokens, return no time."""
        row: dict[str, Any] = {"model": self._kind, "batch": self._batch, "way": way.name, "tree": way.tree}
        if (reason := refusal(way)) is not None:
            return row | {"not_measured": reason}
        try:
            if way in self._broken:
                raise WrongError(self._broken[way])
            return row | self._timed(way)
        except Exception as error:
            why = str(error) if isinstance(error, WrongError) else _first_line(error)
            return row | {"failed" if way.is_ours else "not_measured": why}

    def _timed(self, way: Way) -> dict[str, Any]:
        passes = [self._pass(way)]  # which warms up, too
        outputs = passes[0][1]
        if (fault := self._fault(way, outputs)) is not None:
            raise WrongError(f"other tokens than eager: {fault}")
        if passes[0][0] < _LONG:
            passes = []
        while len(passes) < _PASSES and sum(seconds for seconds, _ in passes) < _ENOUGH:
            passes.append(self._pass(way))
        seconds = statistics.median(seconds for seconds, _ in passes)
        tokens = sum(self._count(number, output) for number, output in enumerate(outputs))
        times = {"tokens": tokens, "seconds": seconds, "passes": len(passes), "tokens_per_s": tokens / seconds}
        return times | (self._speculation(way, outputs, seconds) if way.is_ours else {})

    def _pass(self, way: Way) -> tuple[float, list[Any]]:
        start = now()
        outputs = [self._generate(way, number) for number in range(len(self._work.prompts))]
        return now() - start, outputs

    def _generate(
        self, way: Way, number: int, *, new_tokens: int | None = None, stopwatch: Stopwatch | None = None
    ) -> Any:
        options: dict[str, Any] = {}
        if way.engine == "static":
            options["cache_implementation"] = "static"
        elif stopwatch is not None:
            options["drafter"] = stopwatch
        elif way.drafting == "model":
            options |= {"assistant_model": self._draft_model(), "draft_tree": way.tree}
        elif way.is_ours:
            options["drafter"] = self._drafter(way, number)
        return self._model(way.engine).generate(
            self._work.prompts[number],
            attention_mask=self._work.masks[number],
            max_new_tokens=new_tokens or self._work.new_tokens,
            do_sample=False,
            return_dict_in_generate=True,
            **options,
        )

    def _model(self, engine: str) -> PreTrainedModel:
        """Return the model, compiled as it should be; without a drafter what is compiled is as it was."""
        if engine in POLICIES:
            if engine not in self._models:
                model = work(self._kind, self._batch, quick=self._quick).target
                self._models[engine] = treewy.compile(model, backend="eager", commit=engine)
            return self._models[engine]
        if "ours" not in self._models:
            backend = "aot_eager" if self._quick else "inductor"
            self._models["ours"] = treewy.compile(self._work.target, backend=backend)
        return self._models["ours"]

    def _draft_model(self) -> PreTrainedModel:
        if self._draft is None:
            self._draft = self._work.draft()
        return self._draft

    def _drafter(self, way: Way, number: int) -> Drafter:
        """Return the drafter of a way, the same one every time, lest it be compiled anew."""
        if (way, number) not in self._drafters:
            own = AssistantDrafter(self._draft_model(), way.tree) if way.has_draft_model else None
            rates = self._rates[way.tree] if way.drafting in ("forced", "charged") else ()
            vocab_size = self._work.target.config.vocab_size
            forced = ForcedDrafter(self._expected[number], way.tree, rates, vocab_size, own)
            self._drafters[way, number] = own if way.drafting == "model" and own is not None else forced
        return self._drafters[way, number]

    def _new_tokens(self, number: int, output: Any) -> Tensor:
        tokens: Tensor = output.sequences[:, self._work.prompts[number].shape[1] :]
        return tokens

    def _count(self, number: int, output: Any) -> int:
        """Count the tokens up to the end of each row."""
        tokens = self._new_tokens(number, output)
        eos = self._work.target.generation_config.eos_token_id
        ends = torch.zeros_like(tokens) if eos is None else (tokens == eos).long()
        return int((ends.cumsum(dim=1) - ends == 0).sum())

    @torch.no_grad()
    def _fault(self, way: Way, outputs: list[Any]) -> str | None:
        """Return the first place where tokens differ and, in float32, are no tie."""
        comparison = TokenComparison(self._work.target)
        for number, output in enumerate(outputs):
            rows = zip(self._work.prompts[number], self._work.masks[number], strict=True)
            prompts = [tokens[mask.bool()] for tokens, mask in rows]
            actual = self._new_tokens(number, output)
            comparison.add("tokens", f"{way.name}, prompt {number}", prompts, self._expected[number], actual)
        lines, _ = comparison.judge(Noise(self._work.target.dtype))
        return next((line.fault for line in lines if line.fault), None)

    def _speculation(self, way: Way, outputs: list[Any], seconds: float) -> dict[str, Any]:
        """Return what the rounds were like, and from a generation of its own where their time goes."""
        stats = [output.speculation for output in outputs]
        rounds = sum(s.rounds for s in stats)
        stopwatch = Stopwatch(self._drafter(way, 0))
        self._generate(way, 0, new_tokens=_few_tokens(way), stopwatch=stopwatch)
        return {
            "rounds": rounds,
            "mean_accepted_length": sum(s.mean_accepted_length * s.rounds for s in stats) / rounds,
            "acceptance_by_depth": stats[0].acceptance_by_depth if len(stats) == 1 else None,
            "nodes": max(s.nodes for s in stats),
            "seconds_a_round": seconds / rounds,
            "drafting_s": statistics.median(stopwatch.drafting[1:]),  # the first reads the prompt
            "verifying_s": statistics.median(stopwatch.verifying[1:]),
        }


def _few_tokens(way: Way) -> int:
    """Return for how many tokens some rounds draft whole trees: none is deeper than what is left of the text."""
    return _FEW_TOKENS + len(way.tree)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


def _parents(tree: tuple[int, ...]) -> list[int]:
    return parents_from_widths(tree) if tree else []
