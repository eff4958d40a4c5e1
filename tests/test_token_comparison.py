"""Where two texts may part, and how often, in `check_equivalence`."""

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from models import fresh_model, greedy, random_tokens
from treewy.testing import Comparison, EquivalenceReport
from treewy.testing._bounds import Noise, relative_error
from treewy.testing._tokens import TokenComparison

NEW = 5
PROMPTS = random_tokens(4, 6, seed=5)


def text_of(model: PreTrainedModel) -> Tensor:
    return greedy(model, PROMPTS, torch.ones_like(PROMPTS), NEW)[:, PROMPTS.shape[1] :]


def compare(model: PreTrainedModel, expected: Tensor, actual: Tensor, noise: Noise, generations: int = 1) -> list:
    comparison = TokenComparison(model)
    for number in range(generations):
        comparison.add("tokens", f"generation {number}", list(PROMPTS), expected, actual)
    lines, ties = comparison.judge(noise)
    return [*lines, ties]


def test_equal_texts_have_neither_ties_nor_faults() -> None:
    model = fresh_model("qwen3_5")
    text = text_of(model)
    tokens, places, ties = compare(model, text, text, Noise(torch.float32))
    assert (tokens.compared, tokens.worst, tokens.fault) == (4 * NEW, 0.0, None)
    assert (places.worst, places.fault, ties) == (0, None, ())


@pytest.mark.parametrize(
    ("dtype", "noise", "bound"),
    [(torch.float32, 1e-5, 1e-4), (torch.float32, 0.01, 0.02), (torch.bfloat16, 0.01, 0.02)],
)
def test_a_difference_at_a_gap_is_a_fault_and_names_row_token_and_gap(
    dtype: torch.dtype, noise: float, bound: float
) -> None:
    model = fresh_model("qwen3_5")
    expected = text_of(model)
    actual = expected.clone()
    actual[2, 1] = (actual[2, 1] + 1) % 50
    tokens, places, ties = compare(model, expected, actual, Noise(dtype, gaps=[(1.0, noise)]))
    assert tokens.fault.startswith(f"row 2: new token 1 is {actual[2, 1]}, plain generation has {expected[2, 1]}; ")
    assert tokens.compared == 3 * NEW + 2
    assert tokens.worst > tokens.bound == bound
    assert (places.worst, ties) == (0, ())


def test_a_text_that_ends_early_is_a_fault() -> None:
    model = fresh_model("qwen3_5")
    expected = text_of(model)
    assert compare(model, expected, expected[:, :-1], Noise(torch.float32))[0].fault.startswith(
        "row 0: new token 4 is -1"
    )


def test_tokens_that_are_equally_good_are_ties_and_counted_once_a_place() -> None:
    model = fresh_model("qwen3_5")
    token = int(text_of(model)[1, 0])
    model.lm_head.weight[60] = model.lm_head.weight[token]  # as good as each other, everywhere
    expected = text_of(model)
    is_either = (expected == token) | (expected == 60)
    actual = torch.where(is_either, token + 60 - expected, expected)
    rows = is_either.any(dim=1).nonzero().flatten().tolist()
    assert 1 in rows
    assert len(rows) <= 2
    tokens, *_, places, ties = compare(model, expected, actual, Noise(torch.float32), generations=3)
    assert tokens.fault is places.fault is None
    assert [tie.row for tie in ties] == 3 * rows
    assert max(tie.gap for tie in ties) < 1e-4
    assert places.worst == len(rows)


def test_more_ties_than_the_noise_explains_are_a_fault() -> None:
    model = fresh_model("qwen3_5")
    model.lm_head.weight.zero_()  # every token is a tie
    expected = text_of(model)
    *_, places, ties = compare(model, expected, expected + 1, Noise(torch.float32))
    assert (len(ties), places.bound) == (4, 2)
    assert places.fault == "ties at 4 places; the plain model's own noise explains at most 2.0"
    noisy = Noise(torch.float32, gaps=[(0.0, 0.1)] * 4)  # four tokens that turn one time in two
    assert compare(model, expected, expected + 1, noisy)[-2].fault is None


def test_expected_ties_grow_with_noise_and_generations_and_stay_below_the_tokens() -> None:
    quiet, loud = (Noise(torch.bfloat16, gaps=[(0.5, noise)] * 100) for noise in (0.1, 0.5))
    assert 0 < quiet.expected_ties(1) < 1e-3 < 10 < loud.expected_ties(1) < loud.expected_ties(5) < 100
    assert Noise(torch.bfloat16).expected_ties(5) == 0


def test_bounds_follow_the_noise_from_a_floor_on() -> None:
    exact = Noise(torch.float32, {(0, "GDN state"): 1e-3, (1, "GDN state"): 1e-9}, logits=1e-2, gaps=[(1.0, 1.0)])
    assert exact.store_bound(0, "GDN state") == 4e-3
    assert exact.store_bound(1, "GDN state") == exact.store_bound(2, "GDN state") == 2e-4
    assert exact.logits_bound == 6e-2
    assert exact.tie_bound == 2.0
    assert Noise(torch.float32, gaps=[(1.0, 1e-5)]).tie_bound == Noise(torch.float32).tie_bound == 1e-4
    assert Noise(torch.bfloat16, gaps=[(1.0, 1e-5)]).tie_bound == 2e-5
    assert Noise(torch.bfloat16).store_bound(0, "GDN state") == Noise(torch.bfloat16).logits_bound == 2**-5


@pytest.mark.parametrize(
    ("line", "verdict"),
    [
        (Comparison("stores", "GDN state", 9, 0.2, 0.6), "blind"),
        (Comparison("commit policies", "snapshots: nodes of trees", 9, 0.2, 0.6), "blind"),
        (Comparison("stores", "GDN state", 9, 0.7, 0.6, "row 0"), "FAULT"),
        (Comparison("stores", "GDN state", 9, 0.2, 0.4), "ok"),
        (Comparison("tokens", "scripts, batch 6", 9, 0.2, 0.6), "ok"),  # a distance of logits
    ],
)
def test_a_bound_that_hides_faults_is_not_called_ok(
    line: Comparison, verdict: str, capsys: pytest.CaptureFixture[str]
) -> None:
    EquivalenceReport("tiny", (line,), ()).print()
    printed = capsys.readouterr().out
    assert f" {verdict} " in printed
    assert ("check a float32 copy" in printed) == (verdict == "blind")


def test_the_relative_error_is_that_of_the_greatest_value() -> None:
    assert relative_error(torch.tensor([1.0, 4.5]), torch.tensor([1.0, 4.0])) == 0.125
    assert relative_error(torch.zeros(2), torch.zeros(2)) == 0
    assert relative_error(torch.ones(0), torch.ones(0)) == 0
