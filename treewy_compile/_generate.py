"""``model.generate`` of a compiled model: Hugging Face prepares and finishes, the decoding loop in between is ours."""

import inspect
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.utils import GenerateDecoderOnlyOutput

from treewy._arguments import check_generator, prepare_for_drafting, refuse_unsupported, take_drafter
from treewy._compiled_drafts import CompiledDrafts
from treewy._compiled_session import RING_ROWS, CompiledSize, CompiledTarget
from treewy._decoding import Decoding
from treewy._draft_tree import DraftTree
from treewy._drafters import Drafter, DraftingContext
from treewy._greedy import GreedyDecoding
from treewy._nodes import DeferredNodes, FusedNodes, Nodes, WyNodes
from treewy._rounds import Rounds
from treewy._sampling import SampledDecoding
from treewy._session import Session
from treewy._snapshots import SnapshotNodes
from treewy._stats import SpeculationStats

COMMIT_POLICIES: dict[str, Callable[[], Nodes]] = {
    "immediate": WyNodes,
    "fused": FusedNodes,
    "deferred": DeferredNodes,
    "snapshots": SnapshotNodes,
}

_OUR_ARGUMENTS = ("draft_tree", "drafter", "generator")


def commit_policies(backend: str) -> tuple[str, ...]:
    """Return the commit policies of a backend, the default first."""
    return tuple(COMMIT_POLICIES if backend == "eager" else RING_ROWS)


@dataclass(frozen=True)
class CompileOptions:
    """Options of :func:`treewy.compile`, checked."""

    tree: Sequence[int] | DraftTree | None
    backend: str
    commit: str
    max_cache_len: int | None


@dataclass
class SpeculativeOutput(GenerateDecoderOnlyOutput):  # type: ignore[misc]
    """Hugging Face's output of ``generate`` with what the speculation did.

    Args:
        speculation: Rounds, acceptance and bytes.
    """

    speculation: SpeculationStats | None = None


class CompiledGenerate:
    """Stand in for ``generate`` on one compiled model.

    Without a drafter the model's own ``generate`` runs unchanged.

    Args:
        model: The compiled model.
        options: Its options.
    """

    def __init__(self, model: PreTrainedModel, options: CompileOptions) -> None:
        self._model = model
        self.options = options
        self.replaced = vars(model).get("generate")  # one that was set on this model, rather than its class
        self.original = model.generate
        self.target: CompiledTarget | None = None
        if options.backend != "eager":
            self.target = CompiledTarget(model, options.backend, options.commit)
        self._drafts = CompiledDrafts(options.backend, options.commit)
        self.__doc__ = model.generate.__doc__

    def compiled_sizes(self) -> list[CompiledSize]:
        """List what is compiled of the model and not in use now."""
        return [] if self.target is None else self.target.sizes()

    @property
    def __signature__(self) -> inspect.Signature:
        """Hugging Face's arguments and ours."""
        ours = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in _OUR_ARGUMENTS]
        theirs = inspect.signature(type(self._model).generate)
        theirs = theirs.replace(parameters=[p for p in theirs.parameters.values() if p.name != "self"])
        *named, rest = theirs.parameters.values()
        return theirs.replace(parameters=[*named, *ours, rest])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Generate; see ``GenerationMixin.generate``, plus ``draft_tree`` and ``drafter``.

        Args:
            *args: As for Hugging Face's ``generate``.
            **kwargs: Likewise, and: ``draft_tree``, widths or a ``DraftTree`` whose shape the assistant drafts;
                ``drafter``, a :class:`treewy.Drafter`; ``generator``, a ``torch.Generator`` to sample from instead of
                PyTorch's own, with a drafter.

        Returns:
            What Hugging Face's ``generate`` returns. With ``return_dict_in_generate=True`` and a drafter, the output
            also has ``speculation``; its cache is a plain one, or None if rows committed different numbers of tokens,
            which a plain cache cannot hold.

        Raises:
            ValueError: If an argument cannot be combined with a drafter.
        """
        ours = {name: kwargs.pop(name) for name in _OUR_ARGUMENTS if name in kwargs}
        arguments = inspect.signature(type(self._model).generate).bind(self._model, *args, **kwargs).arguments
        del arguments["self"]
        arguments.update(arguments.pop("kwargs", {}))
        arguments.update(ours)
        generator = arguments.pop("generator", None)
        drafter = take_drafter(self._model, arguments, self.options.tree)
        check_generator(generator, drafter)
        if drafter is None:
            return self.original(*args, **kwargs)
        prepare_for_drafting(self._model, arguments)
        streamer = arguments.get("streamer")

        def decode(model: PreTrainedModel, input_ids: Tensor, **prepared: Any) -> Any:
            return self._decode(drafter, generator, streamer, input_ids, **prepared)

        arguments["custom_generate"] = decode
        return self.original(**arguments)

    @torch.no_grad()
    def _decode(
        self,
        drafter: Drafter,
        generator: torch.Generator | None,
        streamer: Any,
        input_ids: Tensor,
        *,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> Any:
        """Decode as ``GenerationMixin._assisted_decoding`` would, with the arguments that it would get."""
        options, model = self.options, self._model
        batch = len(input_ids)
        refuse_unsupported(generation_config, model_kwargs, streamer, batch)
        if options.max_cache_len is not None and generation_config.max_length > options.max_cache_len:
            raise ValueError(
                f"max_length is {generation_config.max_length} but max_cache_len is {options.max_cache_len}; "
                "compile with a larger max_cache_len or generate less"
            )
        mask = model_kwargs.get("attention_mask")
        mask = torch.ones_like(input_ids) if mask is None else mask
        vocab_size = model.config.get_text_config(decoder=True).vocab_size
        decoding: Decoding
        if generation_config.do_sample:
            decoding = SampledDecoding(logits_processor, stopping_criteria, batch, generator)
        else:
            decoding = GreedyDecoding(logits_processor, stopping_criteria, batch)
        if self.target is None:
            session = Session(model, COMMIT_POLICIES[options.commit], options.max_cache_len)
        else:
            session = self.target.open(options.max_cache_len)

        with ExitStack() as at_end:
            at_end.callback(session.close)

            def open_draft(draft_model: PreTrainedModel, num_nodes: int) -> Session:
                draft = self._drafts.open(draft_model, num_nodes)
                at_end.callback(draft.close)
                return draft

            model_kwargs[session.cache_keyword] = session.cache
            output = model._prefill(input_ids, generation_config, model_kwargs)
            # plain generation goes on from the last position, whatever the mask, and on every axis of a vision model
            next_position = model_kwargs["position_ids"][..., -1].to(model.device) + 1
            session.cache.start_rows(mask.to(model.device), next_position.expand(*next_position.shape[:-1], batch))

            def emit(row: int, token: int) -> None:
                if streamer is not None:
                    streamer.put(torch.tensor([token]))

            drafter.reset()
            if hasattr(drafter, "prepare"):
                drafter.prepare(
                    DraftingContext(
                        decoding.scores.for_drafts(),
                        generation_config.do_sample,
                        generator,
                        [row[~real] for row, real in zip(input_ids, mask.to(input_ids.device).bool(), strict=True)],
                        generation_config.max_length,
                        vocab_size,
                        open_draft,
                    )
                )
            rounds = Rounds(session, drafter, decoding, input_ids.long(), mask, vocab_size, emit)
            rounds.start(output.logits[:, -1])
            while not rounds.all_ended:
                rounds.step()
            if streamer is not None:
                streamer.end()
            return self._output(session, rounds, input_ids, generation_config)

    def _output(
        self, session: Session, rounds: Rounds, input_ids: Tensor, generation_config: GenerationConfig
    ) -> Tensor | SpeculativeOutput:
        """Return what Hugging Face's ``generate`` returns."""
        prompt_length = input_ids.shape[1]
        pad = generation_config._pad_token_tensor
        sequences = torch.nn.utils.rnn.pad_sequence(
            list(rounds.texts), batch_first=True, padding_value=0 if pad is None else int(pad)
        ).to(input_ids.device)
        if not generation_config.return_dict_in_generate:
            return sequences
        num_chunks = ceil(prompt_length / (generation_config.prefill_chunk_size or prompt_length))
        return SpeculativeOutput(
            sequences=sequences,
            speculation=rounds.stats.summary(num_chunks),
            **{session.cache_keyword: session.plain_cache()},
        )
