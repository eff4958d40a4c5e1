"""What the user asks of ``generate``: who drafts, and which arguments remain for Hugging Face's own ``generate``."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteriaList
from transformers.generation.stopping_criteria import StopStringCriteria

from treewy._assistant import AssistantDrafter
from treewy._draft_tree import DraftTree
from treewy._drafters import Drafter, PromptLookupDrafter

_OWN_ASSISTED_DECODING = ("assistant_early_exit", "use_mtp")
_UNSUPPORTED_ARGUMENTS = {
    "assistant_early_exit": "pass an assistant_model or prompt_lookup_num_tokens",
    "assistant_tokenizer": "pass an assistant that shares the model's tokenizer",
    "cache": "pass the whole text as input_ids",
    "cache_params": "pass the whole text as input_ids",
    "custom_generate": "leave out one of them",
    "inputs_embeds": "pass input_ids, which drafts continue",
    "negative_prompt_ids": "leave it out",
    "past_key_values": "pass the whole text as input_ids",
    "synced_gpus": "leave it out",
    "token_healing": "leave it out",
    "use_mtp": "pass an assistant_model or prompt_lookup_num_tokens",
}
_DRAFT_MODEL_SETTINGS = ("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold")
_PADDED_VOCABULARY = 8  # vocabularies of one tokenizer differ by padding, less than an eighth
_FORWARD_ARGUMENTS = {  # what a decoding loop sees of the arguments of forward; images matter to prefill alone
    "attention_mask",
    "cache",
    "image_grid_thw",
    "logits_to_keep",
    "mm_encoder_outputs",
    "mm_token_type_ids",
    "past_key_values",
    "pixel_values",
    "pixel_values_videos",
    "position_ids",
    "use_cache",
    "video_grid_thw",
}
_UNSUPPORTED_OUTPUTS = ("output_scores", "output_logits", "output_hidden_states", "output_attentions")


def take_drafter(
    model: PreTrainedModel, arguments: dict[str, Any], default_tree: Sequence[int] | DraftTree | None
) -> Drafter | None:
    """Take out of the arguments of ``generate`` what says who drafts, and make that drafter.

    Args:
        model: The target.
        arguments: All arguments by name; what concerns drafting is removed.
        default_tree: Shape of an assistant's drafts if the arguments give none.

    Returns:
        The drafter, or None for plain generation.

    Raises:
        ValueError: If the arguments contradict each other or name something that cannot draft for this model.
    """
    for where, config, names in (
        ("model.generation_config", model.generation_config, ("prompt_lookup_num_tokens", *_OWN_ASSISTED_DECODING)),
        ("generation_config", arguments.get("generation_config"), _OWN_ASSISTED_DECODING),
    ):
        for name in names:
            if getattr(config, name, None):
                raise ValueError(
                    f"{where}.{name} is set, so transformers would choose its own assisted decoding; "
                    "set it to None and pass assistant_model or prompt_lookup_num_tokens to generate"
                )
    tree = arguments.pop("draft_tree", None)
    drafter = arguments.pop("drafter", None)
    assistant = arguments.pop("assistant_model", None)
    lookup = _take(arguments, "prompt_lookup_num_tokens")
    ngram = _take(arguments, "max_matching_ngram_size")

    given = {"assistant_model": assistant, "drafter": drafter, "prompt_lookup_num_tokens": lookup}
    sources = [name for name, value in given.items() if value is not None]
    if len(sources) > 1:
        raise ValueError(f"{' and '.join(sources)} both name a drafter; pass one of them")
    if tree is not None and not sources:
        raise ValueError(f"draft_tree={tree!r} needs somebody to draft it; pass assistant_model as well")
    if ngram is not None and lookup is None:
        raise ValueError(f"max_matching_ngram_size={ngram} belongs to prompt lookup; pass prompt_lookup_num_tokens too")
    if tree is not None and assistant is None:
        raise ValueError(f"draft_tree={tree!r} shapes the drafts of an assistant_model, not of {sources[0]}")
    if assistant is not None:
        return assistant_drafter(model, assistant, default_tree if tree is None else tree)
    if lookup is not None:
        return PromptLookupDrafter(lookup) if ngram is None else PromptLookupDrafter(lookup, ngram)
    if drafter is not None and (not isinstance(drafter, Drafter) or isinstance(drafter, type)):
        if isinstance(drafter, PreTrainedModel):
            raise TypeError(f"drafter is a {type(drafter).__name__}; pass a model as assistant_model=")
        missing = [name for name in ("propose", "update", "reset", "reorder") if not hasattr(drafter, name)]
        raise ValueError(
            f"drafter={drafter!r:.60} is not an object with the methods of treewy.Drafter (propose, update, reset, "
            f"reorder){f'; it lacks {missing}' if missing else ''}; derive from treewy.Drafter, or see "
            "treewy.PromptLookupDrafter for a small one"
        )
    return drafter


def check_generator(generator: Any, drafter: Drafter | None) -> None:
    """Refuse what cannot be sampled from."""
    if generator is None:
        return
    if not isinstance(generator, torch.Generator):
        raise TypeError(f"generator is {generator!r:.60}; pass a torch.Generator")
    if drafter is None:
        raise ValueError("generator needs a drafter; plain generation draws from PyTorch's own, see torch.manual_seed")


def prepare_for_drafting(model: PreTrainedModel, arguments: dict[str, Any]) -> None:
    """Refuse what cannot be combined with a drafter before Hugging Face acts on it, and carry stop strings over.

    Hugging Face drops ``tokenizer`` when the decoding loop is not its own, so the criterion is made here.

    Args:
        model: The target.
        arguments: Arguments of ``generate`` by name; ``stop_strings`` and ``tokenizer`` become a stopping criterion.

    Raises:
        ValueError: If an argument cannot be combined with a drafter.
    """
    for name, remedy in _UNSUPPORTED_ARGUMENTS.items():
        value = arguments.get(name)
        if value is not None and value is not False:
            raise ValueError(f"{name} cannot be combined with a drafter yet; {remedy}")
    for name in _DRAFT_MODEL_SETTINGS:
        if arguments.get(name) is not None:
            raise ValueError(f"{name} is read from the draft model; set it on assistant_model.generation_config")
    configs = [model.generation_config]
    if arguments.get("generation_config") is not None:
        configs.append(arguments["generation_config"])
    for cache in (arguments.get("cache_implementation"), *(config.cache_implementation for config in configs)):
        if cache not in (None, "dynamic"):
            raise ValueError(
                f"cache_implementation={cache!r} cannot be combined with a drafter; leave it out: treewy brings its "
                "own cache"
            )
    ids, mask = arguments.get("inputs"), arguments.get("attention_mask")
    ids = arguments.get("input_ids") if ids is None else ids
    if ids is not None and mask is not None and mask.ndim <= 2 and mask.shape != ids.shape:
        raise ValueError(
            f"attention_mask is {list(mask.shape)} but input_ids is {list(ids.shape)}; pass one value a token"
        )
    if model.generation_config.stop_strings is not None:
        raise ValueError(
            "model.generation_config.stop_strings is set; set it to None and pass stop_strings and tokenizer instead"
        )
    tokenizer = arguments.pop("tokenizer", None)
    stop_strings = _take(arguments, "stop_strings")
    if stop_strings is None:
        return
    if tokenizer is None:
        raise ValueError(f"stop_strings={stop_strings!r} are found in text; pass tokenizer as well")
    given = arguments.get("stopping_criteria") or []
    arguments["stopping_criteria"] = StoppingCriteriaList([StopStringCriteria(tokenizer, stop_strings), *given])


def refuse_unsupported(config: GenerationConfig, model_kwargs: dict[str, Any], streamer: Any, batch: int) -> None:
    """Raise for settings that would otherwise be ignored, wherever they came from."""
    for name, value in model_kwargs.items():
        if value is not None and name not in (*_FORWARD_ARGUMENTS, *_UNSUPPORTED_OUTPUTS):
            raise ValueError(f"{name} is an argument of forward that a drafter cannot continue; leave it out")
    mode = config.get_generation_mode()
    if mode not in ("greedy_search", "sample"):
        raise ValueError(
            f"generation mode {mode.value!r} cannot be combined with a drafter; use greedy search or sampling"
        )
    if not config.use_cache:
        raise ValueError("use_cache=False cannot be combined with a drafter, which verifies against a cache; drop it")
    if config.return_dict_in_generate:
        for name in _UNSUPPORTED_OUTPUTS:
            if getattr(config, name):
                raise ValueError(f"{name}=True cannot be combined with a drafter yet; leave it out")
    if streamer is not None and batch > 1:
        raise ValueError(f"a streamer cannot be combined with a drafter and {batch} rows; stream one row at a time")


def _take(arguments: dict[str, Any], name: str) -> Any:
    """Remove a setting from the arguments and, in a copy, from the ``GenerationConfig`` among them; return it."""
    value = arguments.pop(name, None)
    config = arguments.get("generation_config")
    if config is None or getattr(config, name, None) is None:
        return value
    value = getattr(config, name) if value is None else value
    arguments["generation_config"] = copy.deepcopy(config)
    setattr(arguments["generation_config"], name, None)
    return value


def assistant_drafter(
    model: PreTrainedModel, assistant: PreTrainedModel, tree: Sequence[int] | DraftTree | None
) -> AssistantDrafter:
    """Return the drafter of an ``assistant_model``, or raise if it cannot draft for the model."""
    if not isinstance(assistant, PreTrainedModel):
        raise TypeError(f"assistant_model is {assistant!r:.60}; pass a transformers model, or a Drafter as drafter=")
    ours, theirs = (m.config.get_text_config(decoder=True).vocab_size for m in (model, assistant))
    if abs(ours - theirs) * _PADDED_VOCABULARY > max(ours, theirs):
        raise ValueError(
            f"the assistant_model has a vocabulary of {theirs}, the model one of {ours}; "
            "pass an assistant that shares the model's tokenizer"
        )
    return AssistantDrafter(assistant, tree)
