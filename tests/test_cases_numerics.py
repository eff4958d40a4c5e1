"""Public reports of other decoders whose numbers went wrong: a test for each kind, with the report's small input.

Group D of cases.md but for D21, which is in test_policies.py. Each input goes through the operators, as every commit
policy calls them, and through a model that is changed until its layers see such inputs.
"""

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize
from transformers import DynamicCache, PreTrainedModel
from transformers.models.qwen3_next import modeling_qwen3_next

import oracle
from models import (
    FAMILIES,
    assert_stores_equal_plain_run,
    committed_stores,
    fresh_model,
    random_tokens,
    token_by_token,
)
from parents import chain, widths
from tolerances import BFLOAT16_ROUNDING, FLOAT32, LOGITS_FLOAT32, relative_error
from treewy._generate import COMMIT_POLICIES
from treewy._session import Session
from treewy._tree_forward import TreeForward
from treewy.passes import find_gdn_layers
from treewy.testing import OpCase, SolveInputs

every_policy = pytest.mark.parametrize("commit", COMMIT_POLICIES)


def verify_and_commit(commit: str, inputs: SolveInputs) -> tuple[Tensor, Tensor]:
    """The outputs of a tree, and the state after its last node, under a commit policy."""
    batch, size = inputs.parents.shape
    nodes, state, window = COMMIT_POLICIES[commit](), inputs.committed_state.clone(), torch.zeros(batch, 3, 4)
    nodes.add_columns(window, torch.zeros(batch, 3, size), inputs.parents)
    of_nodes = inputs.query, inputs.key, inputs.value, inputs.log_decay, inputs.beta
    output = nodes.solve(state, *of_nodes, inputs.parents, inputs.qk_l2norm)
    nodes.commit_(state, window, inputs.parents, torch.full((batch,), size - 1))
    nodes.materialize_(state)
    return output, state


def assert_equals_recurrence(commit: str, inputs: SolveInputs, *, rounding_of_output: float = 0.0) -> None:
    exact = oracle.solve(*inputs)
    output, state = verify_and_commit(commit, inputs)
    assert relative_error(output, exact[0]) <= FLOAT32 + rounding_of_output
    assert relative_error(state, torch.stack([states[inputs.parents.shape[1] - 1] for states in exact[4]])) <= FLOAT32


@functools.cache
def changed_model(family: str, change: Callable[[nn.Module], None]) -> PreTrainedModel:
    """A plain model whose Gated DeltaNet layers are changed."""
    model = fresh_model(family)
    for layer in find_gdn_layers(model):
        change(model.get_submodule(layer.name))
    return model


def assert_tree_equals_plain_run(
    model: PreTrainedModel, commit: str, prompt: list[int], tree: tuple[int, ...], draft: list[int]
) -> None:
    """Every node's logits, and all stores after a commit of the last node, twice over."""
    session = Session(model, COMMIT_POLICIES[commit])
    session.prefill(torch.tensor([prompt]), torch.ones(1, len(prompt), dtype=torch.int64))
    text, plain = list(prompt), token_by_token(model)
    for _ in range(2):
        logits = session.extend(torch.tensor([draft]), torch.tensor([tree]))
        for node in range(len(tree)):
            path = [draft[step] for step in oracle.path(list(tree), node)]
            assert relative_error(logits[0, node], plain.after(text + path).logits) <= LOGITS_FLOAT32, node
        session.commit(torch.tensor([len(tree) - 1]))
        text += path
        assert_stores_equal_plain_run(session.cache, 0, 0, text, model)


RuleCall = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # query, key, value, log decay, write strength


@pytest.fixture
def rule_calls(monkeypatch: pytest.MonkeyPatch) -> list[RuleCall]:
    """What the layers of a model hand to the rule in tree forwards, so that a test knows that its input arrives."""
    calls: list[RuleCall] = []
    apply_rule = TreeForward.apply_rule

    def spied(
        self: TreeForward, q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor, *rest: Tensor
    ) -> tuple[Tensor, Tensor]:
        calls.append((q, k, v, g, b))
        result: tuple[Tensor, Tensor] = apply_rule(self, q, k, v, g, b, *rest)
        return result

    monkeypatch.setattr(TreeForward, "apply_rule", spied)
    return calls


# --- D20. Gates that underflow


@every_policy
@pytest.mark.parametrize("gate", [-13.0, -50.0, -104.0, -800.0, -1e30])
@pytest.mark.parametrize("parents", [chain(8), widths(2, 2)], ids=["chain", "tree"])
def test_gates_that_forget_everything_leave_finite_numbers(commit: str, gate: float, parents: tuple[int, ...]) -> None:
    """Case D20: lattice#716, executorch#21417. A product of decays underflowed, and its reciprocal was infinite. At
    -104 one gate alone is 0 in float32, at -800 in float64."""
    inputs = OpCase((parents, parents)).solve_inputs(torch.float32)
    everywhere = inputs._replace(log_decay=torch.full_like(inputs.log_decay, gate))
    assert_equals_recurrence(commit, everywhere)
    somewhere = inputs.log_decay.index_fill(1, torch.tensor([2, 5]), gate)
    assert_equals_recurrence(commit, inputs._replace(log_decay=somewhere))


def forget(layer: nn.Module) -> None:
    layer.A_log.zero_()
    layer.dt_bias.fill_(25.0)


def forget_at_once(layer: nn.Module) -> None:
    layer.A_log.fill_(5.0)
    layer.dt_bias.fill_(25.0)


@every_policy
@pytest.mark.parametrize(("change", "gate"), [(forget, -13.0), (forget_at_once, -800.0)], ids=["-13", "-800"])
def test_a_model_that_forgets_everything_decodes_as_the_plain_one(
    family: str, commit: str, change: Callable[[nn.Module], None], gate: float, rule_calls: list[RuleCall]
) -> None:
    """Case D20: lattice#716, executorch#21417, through a model."""
    model = changed_model(family, change)
    prompt, draft = random_tokens(9, seed=1).tolist(), random_tokens(8, seed=2).tolist()
    assert_tree_equals_plain_run(model, commit, prompt, chain(8), draft)
    assert_tree_equals_plain_run(model, commit, prompt, widths(2, 2), draft[:7])
    assert all(float(log_decay.max()) <= gate for _, _, _, log_decay, _ in rule_calls)


# --- D22. Verification rounds like decoding


def bfloat16_step(b: float) -> tuple[SolveInputs, Tensor]:
    """One node at the sizes of Qwen3-Next with write strengths sigmoid(b), as its layers compute them, and b."""
    inputs = OpCase(((-1,), (-1,)), key_dim=128, value_dim=128).solve_inputs(torch.bfloat16)
    logit = torch.full_like(inputs.beta, b)
    state, log_decay = inputs.committed_state.float(), inputs.log_decay.float()
    return inputs._replace(beta=logit.sigmoid(), committed_state=state, log_decay=log_decay), logit


def in_float32(inputs: SolveInputs) -> SolveInputs:
    """The same numbers, so that the same results come out before they are rounded."""
    return inputs._replace(**{name: getattr(inputs, name).float() for name in ("value", "query", "key", "beta")})


def plain_step(inputs: SolveInputs) -> tuple[Tensor, Tensor]:
    """The output and state of a decoding step of transformers."""
    query, key = (x.repeat_interleave(3, dim=2) for x in (inputs.query, inputs.key))  # older versions do not repeat
    output, state = modeling_qwen3_next.torch_recurrent_gated_delta_rule(
        query,
        key,
        inputs.value,
        g=inputs.log_decay,
        beta=inputs.beta,
        initial_state=inputs.committed_state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    return output, state


@every_policy
@pytest.mark.parametrize("b", [-0.5, 0.3, 2.7])
def test_one_bfloat16_node_rounds_like_a_decoding_step(commit: str, b: float) -> None:
    """Case D22: sglang#36014, 1Cat-vLLM#267. The write strength was rounded to bfloat16 on one of the two paths only.

    Both compute in float32 and round the output once. Before that they differ in the last digits, by the order of
    summation, which may turn the rounding of an output or two of 1,536: so the numbers are compared before it, too.
    """
    inputs, logit = bfloat16_step(b)
    exact_output, exact_state = plain_step(in_float32(inputs))
    assert torch.equal(plain_step(inputs)[0], exact_output.bfloat16())
    unrounded, state = verify_and_commit(commit, in_float32(inputs))
    assert relative_error(unrounded, exact_output) <= FLOAT32
    assert relative_error(state, exact_state) <= FLOAT32
    rounded, same_state = verify_and_commit(commit, inputs)
    assert torch.equal(rounded, unrounded.bfloat16())
    assert torch.equal(same_state, state)
    # both would notice a write strength that is not rounded
    for actual, expected in zip(
        verify_and_commit(commit, in_float32(inputs._replace(beta=logit.float().sigmoid()))),
        (exact_output, exact_state),
        strict=True,
    ):
        assert relative_error(actual, expected) > FLOAT32


@every_policy
@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "lara_mini"])
def test_a_bfloat16_model_verifies_one_node_bit_by_bit_as_it_decodes(family: str, commit: str) -> None:
    """Case D22: sglang#36014, 1Cat-vLLM#267, through a model: bits of logits, window, keys and values.

    Not of LARA: where plain decoding has dropped what lies before a window, ours masks it, so that sums have other
    lengths, and on some processors other last bits.
    """
    model = fresh_model(family).bfloat16()
    for seed in range(8):
        prompt, token = random_tokens(1, 11, seed=seed), random_tokens(1, 1, seed=50 + seed)
        session = Session(model, COMMIT_POLICIES[commit])
        cache = DynamicCache(config=model.config)
        model(prompt, use_cache=True, **{session.cache_keyword: cache})
        expected = model(token, use_cache=True, **{session.cache_keyword: cache}).logits[0]
        session.prefill(prompt, torch.ones_like(prompt))
        assert torch.equal(session.extend(token, torch.tensor([[-1]]))[0], expected)
        session.commit(torch.tensor([0]))
        for ours, plain in zip(committed_stores(session.cache, 0, 0), cache.layers, strict=True):
            if hasattr(plain, "recurrent_states"):
                assert relative_error(ours[0], plain.recurrent_states[0][0]) <= FLOAT32
                assert torch.equal(ours[1], plain.conv_states[0][0])
            else:
                assert torch.equal(ours[0], plain.keys[0])
                assert torch.equal(ours[1], plain.values[0])


# --- D30. Heads of a group


@every_policy
@pytest.mark.parametrize(("key_heads", "value_heads"), [(2, 6), (3, 6), (1, 4), (4, 4)])
def test_key_heads_serve_consecutive_value_heads(commit: str, key_heads: int, value_heads: int) -> None:
    """Case D30: llama.cpp#15507. The value heads of a key head were taken tiled instead of interleaved."""
    case = OpCase((widths(2, 2), chain(7)), key_heads=key_heads, value_heads=value_heads)
    inputs = case.solve_inputs(torch.float32)
    assert_equals_recurrence(commit, inputs)
    if 1 < key_heads < value_heads:
        order = torch.arange(value_heads).view(key_heads, -1).T.flatten()
        with pytest.raises(AssertionError):  # the same heads in tiled order
            assert_equals_tiled(commit, inputs, order)


def assert_equals_tiled(commit: str, inputs: SolveInputs, order: Tensor) -> None:
    output, _ = verify_and_commit(commit, inputs)
    of_heads = {name: getattr(inputs, name)[:, :, order] for name in ("value", "log_decay", "beta")}
    tiled = inputs._replace(**of_heads, committed_state=inputs.committed_state[:, order])
    assert relative_error(verify_and_commit(commit, tiled)[0][:, :, order.argsort()], output) <= FLOAT32


@every_policy
def test_a_models_key_head_reaches_the_value_heads_of_its_group_and_no_others(family: str, commit: str) -> None:
    """Case D30: llama.cpp#15507, through a model: another key head in the first layer changes the states of its group
    and leaves the others bit by bit as they were."""
    prompt, draft = random_tokens(1, 9, seed=1), random_tokens(1, 7, seed=2)

    def states(model: PreTrainedModel) -> tuple[Tensor, Tensor]:
        session = Session(model, COMMIT_POLICIES[commit])
        session.prefill(prompt, torch.ones_like(prompt))
        before = committed_stores(session.cache, 0, 0)[0][0]
        session.extend(draft, torch.tensor([widths(2, 2)]))
        session.commit(torch.tensor([6]))
        return before, committed_stores(session.cache, 0, 0)[0][0]

    expected = states(fresh_model(family))
    name = find_gdn_layers(fresh_model(family))[0].name
    layer = fresh_model(family).get_submodule(name)
    ratio = layer.num_v_heads // layer.num_k_heads
    for head in range(layer.num_k_heads):
        model = fresh_model(family)
        first = layer.key_dim + head * layer.head_k_dim
        model.get_submodule(name).conv1d.weight[first : first + layer.head_k_dim] *= -2.0
        changed = [
            {h for h in range(layer.num_v_heads) if not torch.equal(ours[h], plain[h])}
            for ours, plain in zip(states(model), expected, strict=True)
        ]
        assert changed == [set(range(head * ratio, (head + 1) * ratio))] * 2  # by transformers, then by us


# --- D34. Equal keys


def equal_keys(inputs: SolveInputs) -> SolveInputs:
    return inputs._replace(
        key=inputs.key[:, :1].expand_as(inputs.key),
        beta=torch.ones_like(inputs.beta),
        log_decay=torch.zeros_like(inputs.log_decay),
    )


@every_policy
@pytest.mark.parametrize("parents", [chain(64), widths(2, 2, 2, 2, 2)], ids=["chain of 64", "tree of 63"])
def test_equal_unit_keys_without_decay_are_solved_exactly(commit: str, parents: tuple[int, ...]) -> None:
    """Case D34: flash-linear-attention#537, flash-linear-attention#389, maxtext#4577. The inverse exploded when all
    keys were equal, the write strength 1 and nothing was forgotten."""
    assert_equals_recurrence(commit, equal_keys(OpCase((parents,), key_dim=128).solve_inputs(torch.float32)))


@every_policy
def test_equal_unit_keys_of_bfloat16_lose_the_rounding_of_the_output_only(commit: str) -> None:
    """Case D34: flash-linear-attention#537, flash-linear-attention#389, maxtext#4577, for 16 nodes of bfloat16."""
    inputs = equal_keys(OpCase((chain(16),), key_dim=128).solve_inputs(torch.bfloat16))
    inputs = inputs._replace(committed_state=inputs.committed_state.float(), log_decay=inputs.log_decay.float())
    assert_equals_recurrence(commit, inputs, rounding_of_output=BFLOAT16_ROUNDING)


def never_forget(layer: nn.Module) -> None:
    layer.A_log.fill_(-60.0)


@every_policy
def test_a_model_that_never_forgets_takes_one_token_64_times(
    family: str, commit: str, rule_calls: list[RuleCall]
) -> None:
    """Case D34: flash-linear-attention#537, flash-linear-attention#389, maxtext#4577, through a model: in the first
    layer one token again and again has one key."""
    assert_tree_equals_plain_run(changed_model(family, never_forget), commit, [7] * 8, chain(64), [7] * 64)
    _, key, _, log_decay, _ = rule_calls[0]
    assert torch.equal(key, key[:, :1].expand_as(key))
    assert float(log_decay.abs().max()) < 1e-20


# --- D40. Short keys


@every_policy
@pytest.mark.parametrize("norms", [(1e-3, 1e-3), (0.0, 0.0), (1e-3, 0.0), (0.0, 30.0)], ids=str)
def test_short_keys_are_normalised_as_the_plain_rule_does(commit: str, norms: tuple[float, float]) -> None:
    """Case D40: imp#28. The small number in the norm stood elsewhere, so that heads with short keys were wrong."""
    inputs = OpCase((widths(2, 2),), key_dim=128).solve_inputs(torch.float32)
    lengths = torch.tensor(norms)[:, None]
    inputs = inputs._replace(
        key=lengths * normalize(inputs.key, dim=-1), query=lengths * normalize(inputs.query, dim=-1)
    )
    assert_equals_recurrence(commit, inputs)
    if 1e-3 in norms:
        other_form = inputs._replace(key=normalize(inputs.key, dim=-1), query=normalize(inputs.query, dim=-1))
        expected = oracle.solve(*inputs)[0]
        assert relative_error(verify_and_commit(commit, other_form)[0], expected) > 0.1


def shorten_keys(layer: nn.Module) -> None:
    """The first half of the key heads, rounded up, becomes short, the other half zero."""
    keys = layer.conv1d.weight[layer.key_dim : 2 * layer.key_dim].view(layer.num_k_heads, -1)
    short = (layer.num_k_heads + 1) // 2
    keys[:short] *= 1e-3
    keys[short:] = 0.0


@every_policy
def test_a_model_with_short_keys_decodes_as_the_plain_one(family: str, commit: str, rule_calls: list[RuleCall]) -> None:
    """Case D40: imp#28, through a model."""
    prompt, draft = random_tokens(9, seed=1).tolist(), random_tokens(7, seed=2).tolist()
    assert_tree_equals_plain_run(changed_model(family, shorten_keys), commit, prompt, widths(2, 2), draft)
    norms = torch.cat([key.norm(dim=-1).flatten() for _, key, _, _, _ in rule_calls])
    assert float(norms.max()) < 2e-2
    assert bool(((norms > 3e-4) & (norms < 3e-3)).any())
    assert bool((norms == 0).any())
