"""Train the byte-level BPE tokenizer of the pair and turn text into tokens."""

import os
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 4096
EOS = "<|endoftext|>"
PAD = "<|pad|>"
SAMPLE_BYTES = 40_000_000
MAX_LENGTH = 2048


def train(texts: Sequence[str], *, seed: int) -> Tokenizer:
    """Train a tokenizer of 4096 tokens on a seeded sample of at most 40 MB.

    Args:
        texts: training files.
        seed: of the sample.

    Returns:
        The tokenizer; ``<|endoftext|>`` has id 0 and ``<|pad|>`` id 1.
    """
    order = random.Random(seed).sample(range(len(texts)), len(texts))
    sample, size = [], 0
    for i in order:
        if size + len(texts[i]) > SAMPLE_BYTES:
            break
        sample.append(texts[i])
        size += len(texts[i])
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sample, trainer)
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise ValueError(f"the sample gave {tokenizer.get_vocab_size()} tokens, not {VOCAB_SIZE}: use more text")
    return tokenizer


def save(tokenizer: Tokenizer, directory: Path) -> None:
    """Save a tokenizer so that ``AutoTokenizer`` loads it."""
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS,
        pad_token=PAD,
        padding_side="left",
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
    )
    fast.save_pretrained(directory)


def encode(tokenizer: Tokenizer, texts: Sequence[str], *, batch: int = 512) -> npt.NDArray[np.int16]:
    """Tokenise texts into one stream, each followed by the end-of-text token.

    Args:
        tokenizer: the tokenizer.
        texts: files in the order wanted.
        batch: files handed over at a time; each batch uses all processors.

    Returns:
        Token ids (a vocabulary of 4096 fits into 16 bits).
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    eos = [tokenizer.token_to_id(EOS)]
    parts: list[npt.NDArray[np.int16]] = []
    for start in range(0, len(texts), batch):
        encodings = tokenizer.encode_batch_fast(list(texts[start : start + batch]))
        parts.extend(np.array(encoding.ids + eos, dtype=np.int16) for encoding in encodings)
    return np.concatenate(parts)
