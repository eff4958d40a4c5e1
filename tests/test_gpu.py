"""The engine on a CUDA device: the same tokens and the same stores as on the CPU."""

from typing import Any

import pytest
import torch

import treewy
from models import FAMILIES, VOCAB_SIZE, fresh_model, noisy_copy
from treewy._generate import COMMIT_POLICIES
from treewy.testing import check_equivalence

pytestmark = pytest.mark.gpu

TREES = [(1, 1, 1, 1), (3, 2, 1, 1)]


@pytest.mark.parametrize("tree", TREES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_generate_on_a_gpu_equals_plain_generate(family: str, tree: tuple[int, ...]) -> None:
    model = fresh_model(family)
    draft = noisy_copy(model, 0.02, seed=1).cuda()
    model.cuda()
    generator = torch.Generator().manual_seed(2)
    prompt = torch.randint(1, VOCAB_SIZE, (3, 11), generator=generator)
    mask = torch.ones_like(prompt)
    mask[0, :5], mask[2, :1] = 0, 0
    inputs = {"input_ids": prompt.cuda(), "attention_mask": mask.cuda(), "max_new_tokens": 40, "do_sample": False}
    plain = model.generate(**inputs)
    treewy.compile(model)
    output = model.generate(**inputs, assistant_model=draft, draft_tree=tree, return_dict_in_generate=True)
    assert torch.equal(output.sequences, plain)
    assert output.speculation.mean_accepted_length > 1


@pytest.mark.parametrize("family", FAMILIES)
def test_prompt_lookup_on_a_gpu_equals_plain_generate(family: str) -> None:
    model = fresh_model(family).cuda()
    prompt = (torch.arange(24) % 6 + 1)[None].cuda()
    plain = model.generate(prompt, max_new_tokens=40, do_sample=False)
    treewy.compile(model, commit="snapshots")
    assert torch.equal(model.generate(prompt, max_new_tokens=40, do_sample=False, prompt_lookup_num_tokens=5), plain)


def test_a_prompt_on_the_cpu_may_be_given_to_a_model_on_a_gpu() -> None:
    """Processors hold tensors where the prompt is, the engine works where the model is."""
    model = fresh_model("qwen3_5").cuda()
    prompt = torch.randint(2, VOCAB_SIZE, (2, 9), generator=torch.Generator().manual_seed(3))
    options = {"max_new_tokens": 20, "min_new_tokens": 5, "repetition_penalty": 1.2, "do_sample": False}
    options |= {"eos_token_id": 7, "pad_token_id": 0}
    plain = model.generate(prompt, **options)
    treewy.compile(model)
    text = model.generate(prompt, **options, prompt_lookup_num_tokens=4)
    assert torch.equal(text.cpu(), plain.cpu())


@pytest.mark.parametrize("commit", COMMIT_POLICIES)
def test_commit_policies_on_a_gpu_give_the_plain_text(commit: str) -> None:
    model = fresh_model("qwen3_next")
    draft = noisy_copy(model, 0.02, seed=1).cuda()
    model.cuda()
    prompt = torch.randint(2, VOCAB_SIZE, (3, 9), generator=torch.Generator().manual_seed(4)).cuda()
    options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 60, "do_sample": False}
    plain = model.generate(prompt, **options)
    treewy.compile(model, commit=commit)
    assert torch.equal(model.generate(prompt, **options, assistant_model=draft, draft_tree=(2, 1, 1)), plain)


@pytest.mark.parametrize("penalty", [1.0, 1.2], ids=["all rows at once", "row by row"])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("tree", TREES, ids=str)
def test_sampling_on_a_gpu_repeats_with_its_generator(tree: tuple[int, ...], device: str, penalty: float) -> None:
    """And with one possible token it is greedy."""
    model = fresh_model("qwen3_5")
    draft = noisy_copy(model, 0.02, seed=1).cuda()
    treewy.compile(model.cuda())
    prompt = torch.randint(2, VOCAB_SIZE, (3, 9), generator=torch.Generator().manual_seed(4)).cuda()
    options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 30, "repetition_penalty": penalty}
    options |= {"assistant_model": draft, "draft_tree": tree}

    def sample(seed: int, **more: Any) -> Any:
        generator = torch.Generator(device).manual_seed(seed)
        return model.generate(prompt, **options, **more, do_sample=True, generator=generator)

    texts = [sample(seed, temperature=2.0).tolist() for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    greedy = model.generate(prompt, **options, do_sample=False)
    assert torch.equal(sample(3, top_k=1), greedy)


@pytest.mark.parametrize("family", FAMILIES)
def test_check_equivalence_passes_on_a_gpu(family: str) -> None:
    model = fresh_model(family)
    draft = noisy_copy(model, 0.05, seed=1).cuda()
    assert check_equivalence(model.cuda(), assistant_model=draft, max_new_tokens=12).passed
