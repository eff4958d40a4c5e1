"""The rounds of `generate` one by one, for tests that look at the stores between them."""

from collections.abc import Callable

from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from models import VOCAB_SIZE
from treewy import Drafter
from treewy._greedy import GreedyDecoding
from treewy._nodes import Nodes, WyNodes
from treewy._rounds import Rounds
from treewy._session import Session


def start_rounds(
    model: PreTrainedModel,
    prompt: Tensor,
    mask: Tensor,
    drafter: Drafter,
    *,
    max_new_tokens: int,
    eos: list[int] | None = None,
    make_nodes: Callable[[], Nodes] = WyNodes,
    session: Session | None = None,
) -> Rounds:
    """Do what `generate` does before its first round, with a session of its own or the given one."""
    batch, width = prompt.shape
    criteria = StoppingCriteriaList([MaxLengthCriteria(width + max_new_tokens)])
    if eos is not None:
        criteria.append(EosTokenCriteria(eos))
    session = Session(model, make_nodes) if session is None else session
    logits = session.prefill(prompt, mask)
    decoding = GreedyDecoding(LogitsProcessorList(), criteria, batch)
    drafter.reset()
    rounds = Rounds(session, drafter, decoding, prompt, mask, VOCAB_SIZE, emit=lambda row, token: None)
    rounds.start(logits)
    return rounds
