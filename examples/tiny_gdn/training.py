"""Train one model on a token stream: next-token loss for the target, then the target's distribution for the draft."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from transformers import Qwen3_5ForCausalLM

Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Recipe:
    """Hyper-parameters of one run; ``steps`` is fixed beforehand, never driven by the clock."""

    steps: int
    batch: int
    learning_rate: float
    context: int = 512
    warmup: int = 100
    final_fraction: float = 0.05
    weight_decay: float = 0.1
    clip: float = 1.0
    log_every: int = 50

    def rate(self, step: int) -> float:
        """Return the learning rate of a step: linear warmup, then a cosine down to ``final_fraction``."""
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        progress = (step - self.warmup) / max(1, self.steps - self.warmup)
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
        return self.learning_rate * (self.final_fraction + (1 - self.final_fraction) * cosine)


def batches(tokens: torch.Tensor, batch: int, context: int, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield windows of a token stream for ever; an epoch visits each window once, at a freshly drawn offset.

    Args:
        tokens: ``[T]`` int16 ids on the device that trains.
        batch: windows a step.
        context: tokens a window.
        seed: of the offsets and the order.

    Yields:
        Inputs and labels, each ``[batch, context]`` int64.
    """
    generator = torch.Generator().manual_seed(seed)
    columns = torch.arange(context + 1, device=tokens.device)
    while True:
        offset = int(torch.randint(context, (1,), generator=generator))
        starts = torch.arange(offset, len(tokens) - context - 1, context)
        starts = starts[torch.randperm(len(starts), generator=generator)].to(tokens.device)
        if len(starts) < batch:
            raise ValueError(
                f"{len(tokens)} tokens give {len(starts)} windows of {context}, fewer than the batch of {batch}"
            )
        for i in range(0, len(starts) - batch + 1, batch):
            window = tokens[starts[i : i + batch, None] + columns].long()
            yield window[:, :-1], window[:, 1:]


def next_token_loss(logits: torch.Tensor, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy of the true next tokens."""
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def distillation_loss(teacher: Qwen3_5ForCausalLM) -> Loss:
    """Return a loss: the KL divergence from the teacher's next-token distribution to the student's, in nats a token."""

    def loss(logits: torch.Tensor, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            wanted = teacher(inputs, use_cache=False).logits.float().log_softmax(-1).flatten(0, 1)
        return F.kl_div(logits.float().log_softmax(-1).flatten(0, 1), wanted, log_target=True, reduction="batchmean")

    return loss


def optimiser(model: torch.nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    """Return AdamW that decays matrices only: not the embedding, the convolution, norms, gates."""
    decayed: list[torch.nn.Parameter] = []
    plain: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        matrix = parameter.ndim == 2 and "embed_tokens" not in name
        (decayed if matrix else plain).append(parameter)
    groups = [{"params": decayed, "weight_decay": recipe.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.95), fused=True)


def fit(
    model: Qwen3_5ForCausalLM,
    tokens: torch.Tensor,
    recipe: Recipe,
    loss_function: Loss,
    *,
    seed: int,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Train a model in place.

    Args:
        model: in training mode, fp32 weights; computes under bf16 autocast on a GPU.
        tokens: ``[T]`` int16 training stream on the model's device.
        recipe: hyper-parameters.
        loss_function: of logits, inputs and labels.
        seed: of the data order.
        say: receives a line a logged step.

    Returns:
        Steps, tokens, seconds, steps a second and the logged losses.

    Raises:
        RuntimeError: if the loss is not finite at a logged step.
    """
    device = tokens.device
    opt = optimiser(model, recipe)
    stream = batches(tokens, recipe.batch, recipe.context, seed)
    curve: list[tuple[int, float]] = []
    running = torch.zeros((), device=device)
    start, since = time.perf_counter(), 0
    for step in range(recipe.steps):
        for group in opt.param_groups:
            group["lr"] = recipe.rate(step)
        inputs, labels = next(stream)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
            loss = loss_function(model(inputs, use_cache=False).logits, inputs, labels)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        opt.step()
        opt.zero_grad(set_to_none=True)
        running += loss.detach()
        since += 1
        if since == recipe.log_every or step == recipe.steps - 1:
            mean = running.item() / since
            if not math.isfinite(mean):
                raise RuntimeError(
                    f"the loss is {mean} at step {step + 1}: lower the learning rate of {recipe.learning_rate}"
                )
            curve.append((step + 1, round(mean, 4)))
            speed = (step + 1) / (time.perf_counter() - start)
            say(f"step {step + 1}/{recipe.steps}: loss {mean:.4f}, {speed:.2f} steps/s")
            running.zero_()
            since = 0
    seconds = time.perf_counter() - start
    return {
        "steps": recipe.steps,
        "tokens": recipe.steps * recipe.batch * recipe.context,
        "seconds": round(seconds, 1),
        "steps_per_second": round(recipe.steps / seconds, 3),
        "loss_curve": curve,
    }
