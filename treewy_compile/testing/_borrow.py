"""Use a model as a check needs it, and give it back as it was."""

from collections.abc import Iterator
from contextlib import contextmanager

from transformers import GenerationConfig, PreTrainedModel


@contextmanager
def borrowed(model: PreTrainedModel) -> Iterator[None]:
    """Put a model into evaluation mode and give it a plain generation config; at the end undo both, and compiling."""
    generation_config = model.generation_config
    generate = vars(model).get("generate")
    with evaluated(model):
        model.generation_config = GenerationConfig(pad_token_id=0)
        try:
            yield
        finally:
            model.generation_config = generation_config
            vars(model).pop("generate", None)
            if generate is not None:
                model.generate = generate


@contextmanager
def evaluated(model: PreTrainedModel) -> Iterator[None]:
    """Put every module of a model into evaluation mode, and back."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
