"""``treewy.testing.check_equivalence``."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from treewy._arguments import assistant_drafter
from treewy._compile import compile
from treewy._generate import CompiledGenerate, commit_policies
from treewy.testing._borrow import borrowed, evaluated
from treewy.testing._bounds import Noise
from treewy.testing._observe import NodeError, ObservedDrafter, StoreError
from treewy.testing._prompts import checked_prompts, drawn_prompts, left_padded
from treewy.testing._proposals import NOTHING, Proposal, always_wrong, chain, perfect, random_proposal, tree
from treewy.testing._report import (
    ATTENTION_STORES,
    GDN_STORES,
    NODE_LOGITS,
    Comparison,
    EquivalenceError,
    EquivalenceReport,
)
from treewy.testing._scripted import ScriptedDrafter
from treewy.testing._tokens import TokenComparison

_MAX_TREE = 8  # nodes of a drawn tree
_CHAIN_OF_ASSISTANT, _TREE_OF_ASSISTANT = (1, 1, 1), (2, 2, 1)
_LOOKUP_TOKENS = 4


def check_equivalence(
    model: PreTrainedModel,
    *,
    prompts: Tensor | Sequence[Tensor] | None = None,
    assistant_model: PreTrainedModel | None = None,
    max_new_tokens: int = 32,
    seed: int = 0,
) -> EquivalenceReport:
    """Check that speculative decoding of a model gives what plain decoding gives, and print what was compared.

    Greedy text with scripted drafters (right, wrong, partly right, empty, in chains and trees), prompt lookup and the
    assistant is compared with that of plain ``generate``, for one row and for a batch with pads. After every round the
    GDN states, convolution windows and attention entries are compared with those of the plain model after the same
    tokens, and the logits of every draft node with a plain forward over its own path. All of this for each commit
    policy of the backend. Bounds follow from how far the plain model token by token and in one forward lie apart.

    The model may be compiled or not, with any backend; afterwards it is as it was. It decodes greedily in evaluation
    mode with a plain generation config, whatever its own says.

    Args:
        model: A model that ``treewy.compile`` accepts, on any one device and of any dtype.
        prompts: Token ids [B, T], or a list of B rows of any lengths; None draws six rows of 1 to 17 tokens. The plain
            model reads them token by token, so short ones keep the check short.
        assistant_model: A draft model to check as well, as a chain and as a tree.
        max_new_tokens: Tokens to generate a row.
        seed: Of the drawn prompts and trees.

    Returns:
        What was compared, with ties listed.

    Raises:
        EquivalenceError: An ``AssertionError`` whose message names check, row, round, layer, store, error and bound of
            the first difference of each kind; ``.report`` has everything.
        ValueError: If ``treewy.compile`` refuses the model, the assistant cannot draft for it, an argument is
            wrong.
        TypeError: If ``model`` is not a transformers model.

    Example:
        >>> from transformers import Qwen3NextConfig, Qwen3NextForCausalLM
        >>> config = Qwen3NextConfig(
        ...     vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=4, num_attention_heads=2,
        ...     num_key_value_heads=1, head_dim=8, linear_key_head_dim=8, linear_value_head_dim=8,
        ...     linear_num_key_heads=1, linear_num_value_heads=2, num_experts=0)
        >>> report = check_equivalence(Qwen3NextForCausalLM(config), max_new_tokens=8)
        treewy on Qwen3NextForCausalLM, float32, cpu
        ...
        >>> report.passed
        True

    Source:
        docs/testing.md.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"model is {model!r:.60}; check_equivalence takes a transformers model, as from_pretrained returns it"
        )
    if not isinstance(max_new_tokens, int) or max_new_tokens < 2:
        raise ValueError(f"max_new_tokens is {max_new_tokens}; it must be at least 2, since prefill gives the first")
    rng = random.Random(seed)
    options = _options(model)
    with borrowed(model), torch.no_grad():
        compile(model, **options)  # refuses what it does not support before anything is generated
        if assistant_model is not None:
            assistant_drafter(model, assistant_model, None)  # likewise
        rows = drawn_prompts(model, rng) if prompts is None else checked_prompts(model, prompts)
        run = _Run(model, options, rows, max_new_tokens, _scripts(rng))
        run.watch_scripts(options["commit"])
        run.compare_drafters(assistant_model)
        for policy in commit_policies(options["backend"]):
            if policy != options["commit"]:
                run.watch_scripts(policy)
        report = run.report()
    report.print()
    if not report.passed:
        raise EquivalenceError(report)
    return report


def _options(model: PreTrainedModel) -> dict[str, Any]:
    """Return the options with which a model is compiled, or would be by default."""
    generate = vars(model).get("generate")
    if isinstance(generate, CompiledGenerate):
        return dict(vars(generate.options))
    return {"backend": "eager", "commit": commit_policies("eager")[0]}  # the defaults


def _scripts(rng: random.Random) -> dict[str, list[Proposal]]:
    """Return the scripts of a batch by name, one a row."""
    return {
        "perfect": [perfect(5)],
        "always wrong": [always_wrong(4)],
        "wrong at a drawn position": [chain(6, rng.randrange(6)) for _ in range(4)],
        "partial and empty rounds": [chain(4, 3), NOTHING, NOTHING, chain(4, 1)],
        "trees": [tree((2, 2), (0, 2, 6)), tree((3, 1, 1), (0,)), tree((2, 1, 1), (0, 2, 4))],
        "drawn trees": [random_proposal(rng, _MAX_TREE) for _ in range(5)],
    }


@dataclass(frozen=True)
class _Watched:
    """What was seen of one policy."""

    observer: ObservedDrafter
    drafter: ScriptedDrafter
    parted: list[int]  # rows whose text is another from some token on


class _Run:
    """The generations of one check."""

    def __init__(
        self,
        model: PreTrainedModel,
        options: dict[str, Any],
        prompts: list[Tensor],
        max_new_tokens: int,
        scripts: dict[str, list[Proposal]],
    ) -> None:
        self._model = model
        self._options = options
        self._max_new_tokens = max_new_tokens
        size = max(len(prompts), len(scripts))  # every prompt and every script takes part
        self._names = [list(scripts)[row % len(scripts)] for row in range(size)]
        self._scripts = [scripts[name] for name in self._names]
        self._prompts = [prompts[row % len(prompts)] for row in range(size)]
        self._batch = left_padded(self._prompts)
        self._single = max(self._prompts, key=len)
        self._plain = self._generate_plain(*self._batch)
        self._plain_single = self._generate_plain(self._single[None], torch.ones_like(self._single)[None])
        self._noise = Noise(model.dtype)
        self._tokens = TokenComparison(model)
        self._watched: dict[str, _Watched] = {}

    def watch_scripts(self, policy: str) -> None:
        """Generate by scripts under a commit policy and watch; the first time, measure the plain model's noise too."""
        compile(self._model, **{**self._options, "commit": policy})
        drafter = ScriptedDrafter(self._plain.tolist(), self._scripts)
        batch, mask = self._batch
        pads = (mask == 0).sum(dim=1).tolist()
        first = not self._watched
        observer = ObservedDrafter(drafter, self._model, pads, self._max_new_tokens, self._noise if first else None)
        with observer.watching():
            text = self._generate(batch, mask, drafter=observer)
        if first:
            observer.measure_logits()
        check, subject = self._title("tokens", f"scripts, batch {len(batch)}", policy)
        parted = self._tokens.add(check, subject, self._prompts, self._plain, text)
        self._watched[policy] = _Watched(observer, drafter, parted)

    def compare_drafters(self, assistant: PreTrainedModel | None) -> None:
        """Compare the tokens that other drafters give, and those of a single row, with the model's own policy."""
        script = [proposal for script in self._scripts for proposal in script]
        knowing = ScriptedDrafter(self._plain_single.tolist(), [script])
        self._compare_single("scripts", drafter=knowing)
        self._compare("prompt lookup", prompt_lookup_num_tokens=_LOOKUP_TOKENS)
        if assistant is not None:
            with evaluated(assistant):
                for shape in (_CHAIN_OF_ASSISTANT, _TREE_OF_ASSISTANT):
                    self._compare(f"assistant {shape}", assistant_model=assistant, draft_tree=shape)

    def report(self) -> EquivalenceReport:
        """Judge everything by the noise."""
        tokens, ties = self._tokens.judge(self._noise)
        own, *others = self._watched
        lines = [*tokens, *self._lines_of(own)]
        for policy in others:
            lines += self._lines_of(policy)
        what = f"{type(self._model).__name__}, {str(self._model.dtype).removeprefix('torch.')}, {self._model.device}"
        if self._options["backend"] != "eager":
            what += f", backend {self._options['backend']!r}"
        return EquivalenceReport(what, tuple(lines), ties)

    def _compare(self, who: str, **arguments: Any) -> None:
        self._compare_single(who, **arguments)
        text = self._generate(*self._batch, **arguments)
        self._tokens.add("tokens", f"{who}, batch {len(text)}", self._prompts, self._plain, text)

    def _compare_single(self, who: str, **arguments: Any) -> None:
        prompt = self._single[None]
        text = self._generate(prompt, torch.ones_like(prompt), **arguments)
        self._tokens.add("tokens", f"{who}, batch 1", [self._single], self._plain_single, text)

    def _generate(self, prompt: Tensor, mask: Tensor, **arguments: Any) -> Tensor:
        text: Tensor = self._model.generate(
            prompt, attention_mask=mask, max_new_tokens=self._max_new_tokens, do_sample=False, **arguments
        )
        return text[:, prompt.shape[1] :]

    def _generate_plain(self, prompt: Tensor, mask: Tensor) -> Tensor:
        text: Tensor = type(self._model).generate(
            self._model, prompt, attention_mask=mask, max_new_tokens=self._max_new_tokens, do_sample=False
        )
        return text[:, prompt.shape[1] :]

    def _lines_of(self, policy: str) -> list[Comparison]:
        seen = self._watched[policy]
        lines = [self._acceptance(seen)]
        for store in (*GDN_STORES, *ATTENTION_STORES):
            errors = [error for error in seen.observer.store_errors if error.store == store]
            if errors:  # a model may be without attention
                lines.append(self._stores(store, errors))
        lines.append(self._node_logits(seen.observer.node_errors))
        return [
            replace(line, check=check, subject=subject)
            for line in lines
            for check, subject in [self._title(line.check, line.subject, policy)]
        ]

    def _title(self, check: str, subject: str, policy: str) -> tuple[str, str]:
        """Name what was seen under a policy that is not the model's own by that policy."""
        return (check, subject) if policy == self._options["commit"] else ("commit policies", f"{policy}: {subject}")

    def _acceptance(self, seen: _Watched) -> Comparison:
        """Rounds that accepted another number of tokens than scripted, in rows with the tokens of plain generation."""
        rows = [row for row in range(len(self._scripts)) if row not in seen.parted]
        faults = [(row, deviation) for row in rows if (deviation := seen.drafter.deviation(row)) is not None]
        rounds = sum(counts[row] > 0 for counts in seen.drafter.emitted for row in rows)
        fault = f"{self._row(faults[0][0])}, {faults[0][1]}" if faults else None
        return Comparison("acceptance", "rounds by script", rounds, len(faults), 0, fault)

    def _stores(self, store: str, errors: list[StoreError]) -> Comparison:
        def bound(error: StoreError) -> float:
            return self._noise.store_bound(error.layer, store)

        worst = max(errors, key=lambda error: error.error / bound(error))
        faults = [error for error in errors if not error.error <= bound(error)]
        fault = None
        if faults:
            first = faults[0]
            when = f"after round {first.round}" if first.round else "after prefill"
            found = f"error {first.error:.1e}, bound {bound(first):.1e}" if not first.tokens else first.tokens
            fault = f"{self._row(first.row)}, {when}, layer {first.layer}, {store}: {found}"
        return Comparison("stores", store, len(errors), worst.error, bound(worst), fault)

    def _node_logits(self, errors: list[NodeError]) -> Comparison:
        bound = self._noise.logits_bound
        faults = [error for error in errors if not error.error <= bound]
        fault = None
        if faults:
            first = faults[0]
            fault = (
                f"{self._row(first.row)}, round {first.round}, node {first.node} (depth {first.depth}): error "
                f"{first.error:.1e}, bound {bound:.1e}"
            )
        return Comparison(
            "node logits",
            NODE_LOGITS,
            len(errors),
            max((error.error for error in errors), default=0.0),
            bound,
            fault,
        )

    def _row(self, row: int) -> str:
        return f"row {row} ({self._names[row]})"
