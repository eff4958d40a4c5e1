"""``model.generate`` of a compiled model: Hugging Face prepares and finishes, the decoding loop in between is ours."""

import copy
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.utils import GenerateDecoderOnlyOutput

from treewy._assistant import AssistantDrafter
from treewy._draft_tree import DraftTree
from treewy._drafters import Drafter, PromptLookupDrafter
from treewy._greedy import GreedyDecoding
from treewy._nodes import Nodes, SnapshotNodes, WyNodes
from treewy._rounds import Rounds
from treewy._session import Session
from treewy._stats import SpeculationStats

COMMIT_POLICIES: dict[str, Callable[[], Nodes]] = {"immediate": WyNodes, "snapshots": SnapshotNodes}

_OUR_ARGUMENTS = ("draft_tree", "drafter")
_UNSUPPORTED_ARGUMENTS = {
    "assistant_early_exit": "pass an assistant_model or prompt_lookup_num_tokens",
    "assistant_tokenizer": "pass an assistant that shares the model's tokenizer",
    "cache": "pass the whole text as input_ids",
    "cache_params": "pass the whole text as input_ids",
    "custom_generate": "leave out one of them",
    "inputs_embeds": "pass input_ids, which drafts continue",
    "negative_prompt_ids": "leave it out",
    "past_key_values": "pass the whole text as input_ids",
    "position_ids": "leave it out, positions follow from attention_mask",
    "synced_gpus": "leave it out",
    "use_mtp": "pass an assistant_model or prompt_lookup_num_tokens",
}
_UNSUPPORTED_OUTPUTS = ("output_scores", "output_logits", "output_hidden_states", "output_attentions")


@dataclass(frozen=True)
class CompileOptions:
    """Options of :func:`treewy.compile`, checked."""

    tree: Sequence[int] | DraftTree | None
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
        self.__doc__ = model.generate.__doc__

    @property
    def __signature__(self) -> inspect.Signature:
        """Hugging Face's arguments and ours."""
        ours = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in _OUR_ARGUMENTS]
        theirs = inspect.signature(self.original)
        *named, rest = theirs.parameters.values()
        return theirs.replace(parameters=[*named, *ours, rest])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Generate; see ``GenerationMixin.generate``, plus ``draft_tree`` and ``drafter``.

        Args:
            *args: As for Hugging Face's ``generate``.
            **kwargs: Likewise, and: ``draft_tree``, widths or a ``DraftTree`` whose shape the assistant drafts;
                ``drafter``, a :class:`treewy.Drafter`.

        Returns:
            What Hugging Face's ``generate`` returns; with ``return_dict_in_generate=True`` and a drafter, the output
            also has ``speculation``.

        Raises:
            ValueError: If an argument cannot be combined with a drafter.
        """
        for name in ("prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp"):
            if getattr(self._model.generation_config, name, None):
                raise ValueError(
                    f"model.generation_config.{name} is set, so transformers would choose its own assisted decoding; "
                    "set it to None and pass assistant_model or prompt_lookup_num_tokens to generate"
                )
        draft_tree = kwargs.pop("draft_tree", None)
        drafter = kwargs.pop("drafter", None)
        arguments = inspect.signature(self.original).bind(*args, **kwargs).arguments
        arguments.update(arguments.pop("kwargs", {}))
        assistant = arguments.pop("assistant_model", None)
        lookup, lookup_ngram = self._pop_prompt_lookup(arguments)

        given = {"assistant_model": assistant, "drafter": drafter, "prompt_lookup_num_tokens": lookup}
        given = {name: value for name, value in given.items() if value is not None}
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} both name a drafter; pass one of them")
        if not given:
            if draft_tree is not None:
                raise ValueError(f"draft_tree={draft_tree!r} needs somebody to draft it; pass assistant_model as well")
            return self.original(**arguments)
        if draft_tree is not None and assistant is None:
            raise ValueError(
                f"draft_tree={draft_tree!r} shapes the drafts of an assistant_model, not of {next(iter(given))}"
            )
        if assistant is not None:
            drafter = self._assistant_drafter(assistant, self.options.tree if draft_tree is None else draft_tree)
        elif lookup is not None:
            drafter = PromptLookupDrafter(lookup, lookup_ngram or 2)
        elif not isinstance(drafter, Drafter) or isinstance(drafter, type):
            raise ValueError(
                f"drafter={drafter!r} is not an object with the methods of treewy.Drafter (propose, update, reset, "
                "reorder); see treewy.PromptLookupDrafter for a small one"
            )
        for name in _UNSUPPORTED_ARGUMENTS:
            if arguments.get(name) is not None:
                raise ValueError(f"{name} cannot be combined with a drafter yet; {_UNSUPPORTED_ARGUMENTS[name]}")

        streamer = arguments.get("streamer")

        def decode(model: PreTrainedModel, input_ids: Tensor, **prepared: Any) -> Any:
            return self._decode(drafter, streamer, input_ids, **prepared)

        arguments["custom_generate"] = decode
        return self.original(**arguments)

    def _pop_prompt_lookup(self, arguments: dict[str, Any]) -> tuple[int | None, int | None]:
        """Take prompt lookup out of the arguments, so that Hugging Face does not choose its own assisted decoding."""
        config: GenerationConfig | None = arguments.get("generation_config")
        num_tokens = arguments.pop("prompt_lookup_num_tokens", None)
        ngram = arguments.pop("max_matching_ngram_size", None)
        if config is not None and config.prompt_lookup_num_tokens is not None:
            num_tokens = config.prompt_lookup_num_tokens if num_tokens is None else num_tokens
            ngram = config.max_matching_ngram_size if ngram is None else ngram
            arguments["generation_config"] = copy.deepcopy(config)
            arguments["generation_config"].prompt_lookup_num_tokens = None
        return num_tokens, ngram

    def _assistant_drafter(
        self, assistant: PreTrainedModel, tree: Sequence[int] | DraftTree | None
    ) -> AssistantDrafter:
        ours, theirs = (m.config.get_text_config(decoder=True).vocab_size for m in (self._model, assistant))
        if ours != theirs:
            raise ValueError(
                f"the assistant_model has a vocabulary of {theirs}, the model one of {ours}; "
                "pass an assistant that shares the model's tokenizer"
            )
        return AssistantDrafter(assistant, tree)

    @torch.no_grad()
    def _decode(
        self,
        drafter: Drafter,
        streamer: Any,
        input_ids: Tensor,
        *,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> Any:
        """Decode as ``GenerationMixin._assisted_decoding`` would, with the arguments that it would get."""
        _refuse_unsupported(generation_config, streamer, len(input_ids))
        options, model = self.options, self._model
        if options.max_cache_len is not None and generation_config.max_length > options.max_cache_len:
            raise ValueError(
                f"max_length is {generation_config.max_length} but max_cache_len is {options.max_cache_len}; "
                "compile with a larger max_cache_len or generate less"
            )
        decoding = GreedyDecoding(logits_processor, stopping_criteria, len(input_ids))
        session = Session(model, COMMIT_POLICIES[options.commit], options.max_cache_len)
        device = input_ids.device

        model_kwargs[session.cache_keyword] = session.cache
        mask = model_kwargs.get("attention_mask")
        mask = torch.ones_like(input_ids) if mask is None else mask
        if mask.shape != input_ids.shape:
            raise ValueError(f"attention_mask is {list(mask.shape)} but input_ids is {list(input_ids.shape)}")
        output = model._prefill(input_ids, generation_config, model_kwargs)
        session.start(mask.to(model.device))

        def emit(row: int, token: int) -> None:
            if streamer is not None:
                streamer.put(torch.tensor([token]))

        drafter.reset()
        rounds = Rounds(
            session,
            drafter,
            decoding,
            input_ids.to(model.device),
            mask.to(model.device),
            model.config.get_text_config(decoder=True).vocab_size,
            emit,
        )
        rounds.start(output.logits[:, -1])
        while not bool(rounds.ended.all()):
            rounds.step()
        if streamer is not None:
            streamer.end()

        pad = generation_config._pad_token_tensor
        sequences = torch.nn.utils.rnn.pad_sequence(
            rounds.texts, batch_first=True, padding_value=0 if pad is None else int(pad)
        ).to(device)
        if not generation_config.return_dict_in_generate:
            return sequences
        one_length = bool((session.cache.lengths == session.cache.columns_used).all())
        return SpeculativeOutput(
            sequences=sequences,
            speculation=rounds.stats.summary(),
            **{session.cache_keyword: session.cache.to_dynamic_cache() if one_length else None},
        )


def _refuse_unsupported(config: GenerationConfig, streamer: Any, batch: int) -> None:
    """Raise for what would otherwise be ignored."""
    if config.do_sample:
        raise ValueError("do_sample=True cannot be combined with a drafter yet; pass do_sample=False")
    mode = config.get_generation_mode()
    if mode != "greedy_search":
        raise ValueError(f"generation mode {mode.value!r} cannot be combined with a drafter; use greedy search")
    if not config.use_cache:
        raise ValueError("use_cache=False cannot be combined with a drafter, which verifies against a cache; drop it")
    if config.cache_implementation not in (None, "dynamic"):
        raise ValueError(
            f"cache_implementation={config.cache_implementation!r} cannot be combined with a drafter; leave it out: "
            "treewy brings its own cache"
        )
    if config.return_dict_in_generate:
        for name in _UNSUPPORTED_OUTPUTS:
            if getattr(config, name):
                raise ValueError(f"{name}=True cannot be combined with a drafter yet; leave it out")
    if streamer is not None and batch > 1:
        raise ValueError(f"a streamer cannot be combined with a drafter and {batch} rows; stream one row at a time")
