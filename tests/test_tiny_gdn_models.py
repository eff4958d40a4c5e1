"""The trained pair that examples/tiny_gdn ships: it loads, fits its budget, and its records agree with it."""

import json
import lzma
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

HERE = Path(__file__).parents[1] / "examples" / "tiny_gdn"
sys.path.insert(0, str(HERE))

import acceptance  # noqa: E402
import evaluate  # noqa: E402
import licences  # noqa: E402

PAIR = ("target", "draft")


@pytest.fixture(scope="module")
def manifest() -> dict:
    return json.loads((HERE / "manifest.json").read_text())


@pytest.fixture(scope="module")
def prompts() -> list[dict]:
    return [json.loads(line) for line in (HERE / "held_out.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", PAIR)
def test_model_loads_as_a_hybrid_with_the_vocabulary_of_its_tokenizer(name: str):
    model, tokenizer = (a.from_pretrained(HERE / name) for a in (AutoModelForCausalLM, AutoTokenizer))
    assert model.dtype == torch.bfloat16
    assert model.config.vocab_size == len(tokenizer) == 4096
    assert model.config.layer_types.count("linear_attention") == 3 * model.config.layer_types.count("full_attention")
    assert (model.config.head_dim, model.config.linear_key_head_dim, model.config.linear_value_head_dim) == (64,) * 3
    generation = model.generation_config
    assert generation.do_sample is False
    assert generation.eos_token_id == tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids("<|endoftext|>")
    assert generation.pad_token_id == tokenizer.pad_token_id != tokenizer.eos_token_id


def test_pair_is_small_and_the_draft_is_about_an_eighth():
    files = [f for name in PAIR for f in (HERE / name).iterdir()]
    assert sum(f.stat().st_size for f in files) <= 20_000_000
    target, draft = (AutoModelForCausalLM.from_pretrained(HERE / name).num_parameters() for name in PAIR)
    assert 7e6 <= target <= 8e6
    assert 1 / 9 < draft / target < 1 / 7


@pytest.mark.parametrize("text", ["def f(x):\n\treturn x  # é δ\n\n\nclass A:\n        pass\n", "", "don't  it's\n   "])
def test_tokenizer_round_trips_any_text(text: str):
    tokenizer = AutoTokenizer.from_pretrained(HERE / "target")
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_prompts_have_64_to_256_tokens_and_say_where_they_come_from(prompts: list[dict], manifest: dict):
    tokenizer = AutoTokenizer.from_pretrained(HERE / "target")
    held_out = {p["name"]: p for p in manifest["packages"] if p["split"] == "held_out"}
    assert 40 <= len(prompts) <= 64
    assert sum(not p["loops"] for p in prompts) >= 40
    assert len({p["id"] for p in prompts}) == len(prompts)
    for prompt in prompts:
        assert 64 <= len(tokenizer(prompt["prompt"]).input_ids) <= 256
        assert prompt["licence"] == held_out[prompt["package"]]["licence"]
    licence_texts = (HERE / "held_out_licences.txt").read_text()
    assert all(f"\n{name} {p['version']}\n" in licence_texts for name, p in held_out.items())


def test_manifest_lists_permissive_packages_each_on_one_side(manifest: dict):
    sides: dict[str, set[str]] = {}
    for package in manifest["packages"]:
        sides.setdefault(package["name"], set()).add(package["split"])
        known = package["licence_field"] in ("License-Expression", "Classifier", "standard library")
        assert not known or licences.spdx_allowed(package["licence"]), package
    assert all(len(side) == 1 for side in sides.values())
    listing = lzma.decompress((HERE / "manifest_files.tsv.xz").read_bytes()).decode()
    rows = [row.split("\t") for row in listing.splitlines()]
    for side in ("train", "held_out"):
        assert sum(row[0] == side for row in rows) == manifest[side]["files"]
        assert {row[1] for row in rows if row[0] == side} == {n for n, s in sides.items() if s == {side}}


def test_training_log_states_the_accepted_length_that_was_needed():
    shapes = json.loads((HERE / "training_log.json").read_text())["acceptance"]["all_prompts"]["shapes"]
    chain, tree = shapes[str(evaluate.CHAIN)]["mean_accepted"], shapes[str(evaluate.TREE)]["mean_accepted"]
    assert chain >= 2.5
    assert tree > chain


def test_held_out_continuations_are_accepted_as_the_log_says(prompts: list[dict]):
    device = torch.device("cpu")
    target, draft = (evaluate.load(HERE / name, device) for name in PAIR)
    tokenizer = AutoTokenizer.from_pretrained(HERE / "target")
    some = [tokenizer(p["prompt"]).input_ids for p in prompts[:8]]
    logged = json.loads((HERE / "evaluation.json").read_text())["shipped_prompts"]["each"][:8]
    result = evaluate.accepted_length(target, draft, some, batch=8)
    assert [e["loops"] for e in result["each"]] == [p["loops"] for p in prompts[:8]]
    total = sum((acceptance.Replay(e["chain"], e["tokens"] - 1) for e in logged), acceptance.Replay(0, 0))
    assert abs(result["shapes"][str(evaluate.CHAIN)]["mean_accepted_with_loops"] - total.mean_accepted) < 0.15
