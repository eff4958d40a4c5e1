"""A model file that follows the pattern of transformers needs no line of ours; one that departs from it is refused."""

import pytest
import torch
from torch import Tensor

import treewy
from knowing_drafter import KnowingDrafter
from made_up_model import CalmTide, EbbingTide, TidalForCausalLM, Tide, tidal_model
from models import greedy, left_padded
from tolerances import LOGITS_FLOAT32, relative_error
from treewy._compiled_session import CompiledSession, CompiledTarget

pytestmark = pytest.mark.usefixtures("nothing_compiled_is_kept")

BACKENDS = ("eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.gpu))
NEW = 24
SCHEDULES = {"partial": (2, 0, 1, 3), "zero": (0,), "full": (3,)}


def prompts(model: TidalForCausalLM) -> tuple[Tensor, Tensor]:
    prompt, mask = left_padded([7, 4], seed=1)
    return prompt.to(model.device), mask.to(model.device)


def plain(model: TidalForCausalLM) -> Tensor:
    return greedy(model, *prompts(model), NEW)


def speculate(model: TidalForCausalLM, text: Tensor, schedule: tuple[int, ...]) -> treewy.SpeculationStats:
    """Generate all but the last tokens of the text, and hold both against each other."""
    prompt, mask = prompts(model)
    texts = [row[first:].tolist() for row, first in zip(text, (mask == 0).sum(dim=1), strict=True)]
    options = {"max_new_tokens": NEW - 4, "do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True}
    drafter = KnowingDrafter(texts, schedule, depth=3)
    output = model.generate(prompt, attention_mask=mask, drafter=drafter, **options)
    assert output.sequences.tolist() == text[:, :-4].tolist()
    stats: treewy.SpeculationStats = output.speculation
    return stats


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_model_that_follows_the_pattern_gives_its_plain_text(backend: str) -> None:
    """With drafts of which a part, nothing, and all is accepted."""
    device = "cuda" if backend == "inductor" else "cpu"
    text = plain(tidal_model().to(device))
    model = treewy.compile(tidal_model().to(device), backend=backend)
    lengths = {name: speculate(model, text, schedule).mean_accepted_length for name, schedule in SCHEDULES.items()}
    assert 1 == lengths["zero"] < lengths["partial"] < lengths["full"]


@pytest.mark.parametrize(
    ("tide", "backend", "message"),
    [
        (EbbingTide, "eager", "keeps another state than its delta rule returned"),
        (EbbingTide, "aot_eager", "not in one copy_ alone"),
        (CalmTide, "aot_eager", "does not put its convolution window before the new columns"),
    ],
)
def test_a_layer_that_departs_from_the_pattern_is_refused_by_name(tide: type[Tide], backend: str, message: str) -> None:
    """And the model is still what it was."""
    text = plain(tidal_model(tide))
    model = treewy.compile(tidal_model(tide), backend=backend)
    with pytest.raises(ValueError, match=rf"layer 'sea\.days\.0\.water' .*{message}.*generate without a drafter"):
        speculate(model, text, SCHEDULES["partial"])
    assert torch.equal(plain(model), text)


def test_what_a_compiled_backend_refuses_the_eager_one_may_know() -> None:
    """It convolves whatever window it is given."""
    text, model = plain(tidal_model(CalmTide)), tidal_model(CalmTide)
    with pytest.raises(ValueError, match="generate without a drafter"):
        speculate(treewy.compile(model, backend="aot_eager"), text, SCHEDULES["partial"])
    assert speculate(treewy.compile(model), text, SCHEDULES["partial"]).mean_accepted_length > 2


@pytest.mark.parametrize("tide", [EbbingTide, CalmTide])
def test_the_cache_of_a_refused_model_goes_on(tide: type[Tide]) -> None:
    model = tidal_model(tide)
    prompt, last = prompts(model)[0][:1].split([6, 1], dim=1)
    session = CompiledSession(CompiledTarget(model, "aot_eager", "deferred"))
    session.prefill(prompt, torch.ones_like(prompt))
    with pytest.raises(ValueError, match="generate without a drafter"):
        session.extend(last, torch.tensor([[-1]]))
    caches = session.plain_cache(), model(prompt, use_cache=True)[session.cache_keyword]
    ours, theirs = (model(last, use_cache=True, **{session.cache_keyword: cache}).logits for cache in caches)
    assert relative_error(ours, theirs) <= LOGITS_FLOAT32
