"""Texts that grow, against lists."""

import random

import torch

from treewy._texts import Texts

CPU = torch.device("cpu")


def test_rows_are_the_prompt_and_what_was_added() -> None:
    """Through pads anywhere, rows that stand still, columns that do not count, and more than there was room for."""
    rng = random.Random(0)
    prompt = torch.tensor([[0, 0, 7, 8, 9], [3, 0, 4, 5, 6], [0, 0, 0, 0, 0]])
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 0, 1, 1, 1], [0, 0, 0, 0, 0]])
    texts = Texts(prompt, mask, CPU)
    expected = prompt.tolist()
    real = [
        [token for token, is_real in zip(*row, strict=True) if is_real]
        for row in zip(prompt.tolist(), mask.tolist(), strict=True)
    ]
    generator = torch.Generator().manual_seed(0)
    for _ in range(60):
        width = rng.randint(1, 9)
        counts = [rng.randint(0, width) for _ in expected]
        tokens = torch.randint(10, 99, (3, width), generator=generator)
        texts.append(tokens, torch.tensor(counts), counts)
        for row, count in enumerate(counts):
            expected[row] += tokens[row, :count].tolist()
            real[row] += tokens[row, :count].tolist()
        assert [text.tolist() for text in texts] == expected
        assert texts.lengths == [len(text) for text in expected]
        padded, number = texts.real_tokens()
        assert number.tolist() == [len(row) for row in real]
        assert padded.tolist() == [[*row, *[0] * (padded.shape[1] - len(row))] for row in real]
        padded.zero_(), number.sub_(1), prompt.zero_()  # nobody who has or gave a tensor can change the texts
    assert texts.last_tokens().tolist() == [[row[-1]] for row in real]
    assert max(texts.lengths) > 128
