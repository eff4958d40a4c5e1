"""Public reports of decoders that leaked into the process: a test for each kind, with the report's small input.

Group F of cases.md but for F15, which needs captured graphs, and F23 and F24, which are in ops/test_registration.py.
"""

import ast
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.exc
import torch._inductor.config
import transformers
from torch import Tensor
from transformers import PreTrainedModel

import treewy
import user_program
from api_models import MIXED, PROMPT, cache_keyword, knowing, model_snapshot, modeling_globals, noisy_draft, plain_text
from contract import THREE, THREE_MASK
from models import fresh_model, noisy_copy, plain_model, random_tokens
from tolerances import LOGITS_FLOAT32, relative_error
from treewy import AssistantDrafter, PromptLookupDrafter
from treewy._generate import COMMIT_POLICIES
from treewy.passes import find_gdn_layers, redirect_layers
from treewy.testing import perfect

NEW = 14

every_policy = pytest.mark.parametrize("commit", COMMIT_POLICIES)


def forward_outputs(model: PreTrainedModel) -> list[Tensor]:
    """Prefill, one token and several tokens with a cache: every path of a GDN layer."""
    cache = transformers.DynamicCache(config=model.config)
    steps = (PROMPT, PROMPT[:, :1], PROMPT[:, :3])
    return [model(step, use_cache=True, **{cache_keyword(model): cache}).logits for step in steps]


def assert_bits_equal(actual: list[Tensor], expected: list[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


# --- F12. What a call leaves for the next one


@every_policy
def test_a_second_call_is_that_of_a_fresh_model(commit: str) -> None:
    """Case F12: transformers#30351. A cache that belonged to the first prompt answered the second. Each drafter is one
    object that serves all calls."""
    plain, model = plain_model("qwen3_next"), treewy.compile(fresh_model("qwen3_next"), commit=commit)
    calls: list[tuple[Tensor, int, dict[str, Any]]] = [
        (PROMPT, 4, {}),
        (random_tokens(1, 17, seed=6), 12, {}),  # other and longer
        (THREE, 6, {"attention_mask": THREE_MASK, "pad_token_id": 0}),  # of another number of rows
    ]
    for drafter in (AssistantDrafter(noisy_copy(plain, 0.05), (2, 1)), PromptLookupDrafter(3)):
        for prompt, number, options in calls:
            options = options | {"do_sample": False, "max_new_tokens": number, "return_dict_in_generate": True}
            output = model.generate(prompt, drafter=drafter, **options)
            assert torch.equal(output.sequences, plain.generate(prompt, **options).sequences)
            fresh = treewy.compile(fresh_model("qwen3_next"), commit=commit).generate(
                prompt, drafter=drafter, **options
            )
            assert output.speculation == fresh.speculation


# --- F29. Threads


@pytest.fixture
def frequent_switches() -> Iterator[None]:
    """Threads take turns much more often than usual."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


@every_policy
@pytest.mark.usefixtures("frequent_switches")
def test_threads_compile_and_generate_on_a_model_each_and_then_share_one(commit: str) -> None:
    """Case F29: pytorch#118260, pytorch#126024. The state of a compiler was global. All state of ours lives in a call,
    so that threads may even share a model."""
    before = modeling_globals(plain_model("qwen3_next"))
    prompts = (PROMPT, random_tokens(1, 6, seed=9))
    models = [fresh_model("qwen3_next", seed) for seed in range(2)]
    expected = [plain_text(plain_model("qwen3_next", seed), prompts[seed], NEW) for seed in range(2)]
    shared = [plain_text(plain_model("qwen3_next"), prompt, NEW) for prompt in prompts]
    start = threading.Barrier(2)

    def texts(model: PreTrainedModel, prompt: Tensor, text: Tensor) -> list[Tensor]:
        options = {"max_new_tokens": NEW, "do_sample": False}
        scripts = (MIXED, (perfect(3),))
        texts = [model.generate(prompt, drafter=knowing(text, prompt, script), **options) for script in scripts]
        return [*texts, model.generate(prompt, assistant_model=plain_model("qwen3_next"), draft_tree=(2, 1), **options)]

    def compile_and_generate(model: PreTrainedModel, prompt: Tensor, text: Tensor) -> list[Tensor]:
        start.wait()
        return texts(treewy.compile(model, commit=commit), prompt, text)

    def share(model: PreTrainedModel, prompt: Tensor, text: Tensor) -> list[Tensor]:
        start.wait()
        return texts(model, prompt, text)

    for work, targets, right in ((compile_and_generate, models, expected), (share, [models[0]] * 2, shared)):
        with ThreadPoolExecutor(2) as pool:
            running = [pool.submit(work, *job) for job in zip(targets, prompts, right, strict=True)]
            for job, text in zip(running, right, strict=True):
                assert all(torch.equal(result, text) for result in job.result())
    assert modeling_globals(plain_model("qwen3_next")) == before


@pytest.mark.xfail(
    raises=torch._dynamo.exc.InternalTorchDynamoError,
    reason="the functions of a modeling file are replaced while nodes are verified, also for a thread that traces them",
)
@pytest.mark.parametrize("redirection", ["begins", "ends"])
def test_a_model_of_the_class_may_be_traced_while_another_one_speculates(redirection: str) -> None:
    """Case F29: pytorch#118260, pytorch#126024. What another thread may do at any time happens here between the first
    graph and its guards: a forward of nodes begins or ends."""
    other = plain_model("qwen3_next")
    expected = other(PROMPT).logits
    torch._dynamo.reset()
    of_the_other_thread = ExitStack()
    if redirection == "ends":
        of_the_other_thread.enter_context(redirect_layers(find_gdn_layers(other)))
    graphs: list[torch.fx.GraphModule] = []

    def users_backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append(graph)
        if redirection == "ends":
            of_the_other_thread.close()
        elif len(graphs) == 1:
            of_the_other_thread.enter_context(redirect_layers(find_gdn_layers(other)))
        return graph.forward

    with of_the_other_thread:
        assert torch.equal(torch.compile(other.forward, backend=users_backend)(PROMPT).logits, expected)
    assert graphs


# --- F33. Patches


@pytest.mark.parametrize(
    ("commit", "where"),
    [*((commit, "nowhere") for commit in COMMIT_POLICIES), ("immediate", "target"), ("immediate", "assistant")],
)
def test_the_assistant_of_the_targets_class_and_the_target_itself_stay_as_they_were(
    family: str, commit: str, where: str
) -> None:
    """Case F33: Liger-Kernel#772. A forward was replaced on the class, and so for all its models. Here also when a
    forward of nodes is broken off."""
    target, assistant = fresh_model(family), fresh_model(family, seed=1)
    models = {"target": target, "assistant": assistant}
    expected = {name: forward_outputs(model) for name, model in models.items()}
    snapshots = {name: model_snapshot(model) for name, model in models.items()}
    text, before = plain_text(plain_model(family), PROMPT, NEW), modeling_globals(target, assistant)

    treewy.compile(target, commit=commit)
    compiled = model_snapshot(target)
    assert set(compiled["attributes"]) - set(snapshots["target"]["attributes"]) == {"generate"}
    assert compiled["class"] == snapshots["target"]["class"]
    options = {"assistant_model": assistant, "draft_tree": (2, 1), "max_new_tokens": NEW, "do_sample": False}
    if where == "nowhere":
        assert torch.equal(target.generate(PROMPT, **options), text)
    else:
        calls: list[int] = []

        def interrupt(*_: Any) -> None:
            calls.append(1)
            if len(calls) == 3:  # behind prefill, in the middle of the decoder
                raise RuntimeError("interrupted")

        layer = next(m for name, m in models[where].named_modules() if name.endswith("layers.2"))
        handle = layer.register_forward_pre_hook(interrupt)
        with pytest.raises(RuntimeError, match="interrupted"):
            target.generate(PROMPT, **options)
        handle.remove()
    assert modeling_globals(target, assistant) == before
    assert model_snapshot(assistant) == snapshots["assistant"]
    assert model_snapshot(target) == compiled
    for name, model in models.items():
        assert_bits_equal(forward_outputs(model), expected[name])
    assert torch.equal(plain_text(assistant, PROMPT, NEW), plain_text(plain_model(family, seed=1), PROMPT, NEW))
    assert torch.equal(target.generate(PROMPT, **options), text)
    treewy.restore(target)
    assert model_snapshot(target) == snapshots["target"]


# --- F41. A user's own compiler passes


def use_treewy() -> None:
    model = treewy.compile(fresh_model("qwen3_next"), tree=(2, 1))
    model.generate(PROMPT, max_new_tokens=6, assistant_model=noisy_draft("qwen3_next"), do_sample=False)


WITHOUT_TREEWY = """
import sys, user_program
print(user_program.compile_and_run())
assert not any(name.startswith("treewy") for name in sys.modules)
"""
WITH_TREEWY = """
import os, test_cases_process, user_program
test_cases_process.use_treewy()
print(user_program.compile_and_run())
os.environ["TORCHINDUCTOR_CACHE_DIR"] += " that is cold"
print(user_program.compile_and_run())
"""


def test_a_users_pass_and_the_cache_of_compiled_graphs_do_not_notice_treewy(tmp_path: Path) -> None:
    """Case F41: pytorch#178048. Passes live in a global configuration: they leaked, replaced those of others, and made
    the cache miss. A process without treewy fills the cache here, and one with treewy finds it warm."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]).rstrip(
            os.pathsep
        ),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
    }
    printed = []
    for program in (WITHOUT_TREEWY, WITH_TREEWY):
        command = [sys.executable, "-P", "-c", program]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
        printed += [ast.literal_eval(line) for line in result.stdout.splitlines()]
    (graphs, *cold), warm, again = printed
    assert (len(graphs), *cold) == (1, 0, 1)
    assert warm == ([], 1, 0)  # from the cache, in which the pass has done its work
    assert again == (graphs, 0, 1)  # the same graph comes to the same pass


def test_treewy_leaves_a_pass_alone_that_is_set_while_it_runs() -> None:
    """Case F41: pytorch#178048. The configuration is the user's: the same object before and after, and no pass of it
    runs in a generation."""
    users_pass = user_program.UsersPass()
    with torch._inductor.config.patch(post_grad_custom_pre_pass=users_pass, post_grad_custom_post_pass=users_pass):
        before = user_program.inductor_settings()
        use_treewy()
        assert user_program.inductor_settings() == before
        assert torch._inductor.config.post_grad_custom_pre_pass is users_pass
        assert torch._inductor.config.post_grad_custom_post_pass is users_pass
    assert users_pass.graphs == []


def test_a_users_backend_gets_the_same_graphs_with_treewy_and_without() -> None:
    """Case F41: pytorch#178048, for a backend of the user's own on a model of the compiled class."""
    other = plain_model("qwen3_next")

    def traced() -> tuple[list[list[str]], Tensor]:
        torch._dynamo.reset()
        seen: list[list[str]] = []

        def users_backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
            seen.append([str(node.target) for node in graph.graph.nodes])
            return graph.forward

        return seen, torch.compile(other.forward, backend=users_backend)(PROMPT).logits

    backends, config = torch._dynamo.list_backends(()), torch._dynamo.config.get_config_copy()
    without, expected = traced()
    use_treewy()
    graphs, logits = traced()
    assert graphs == without
    assert torch.equal(logits, expected)
    assert relative_error(logits, other(PROMPT).logits) <= LOGITS_FLOAT32  # traced, the model may sum in another order
    assert sum(map(len, without)) > 50
    assert torch._dynamo.list_backends(()) == backends
    assert torch._dynamo.config.get_config_copy() == config
