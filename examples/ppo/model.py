"""A small GPT with a key/value cache, once with a language head (the policy) and once with a value head."""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclasses.dataclass(frozen=True)
class GPTConfig:
    """Sizes of the network; ``context`` is the longest sequence it can read."""

    vocab_size: int
    context: int
    layers: int = 2
    width: int = 64
    heads: int = 4


class Cache:
    """Keys and values of all tokens read so far, one pair a layer."""

    def __init__(self, layers: int) -> None:
        self.layers: list[tuple[Tensor, Tensor] | None] = [None] * layers

    @property
    def length(self) -> int:
        first = self.layers[0]
        return 0 if first is None else first[0].shape[2]

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        past = self.layers[layer]
        if past is not None:
            key, value = torch.cat([past[0], key], dim=2), torch.cat([past[1], value], dim=2)
        self.layers[layer] = (key, value)
        return key, value


class Block(nn.Module):
    """Attention and a two-layer network, each behind a layer norm and with a residual path."""

    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.heads = layer, config.heads
        self.norm1 = nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)
        self.norm2 = nn.LayerNorm(config.width)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width), nn.GELU(), nn.Linear(4 * config.width, config.width)
        )

    def forward(self, x: Tensor, cache: Cache | None) -> Tensor:
        n, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(n, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        if cache is not None:
            key, value = cache.extend(self.layer, key, value)
        # With a cache, either the whole prompt comes first (causal) or a single token that may see all before it.
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=length > 1)
        x = x + self.out(attended.transpose(1, 2).reshape(n, length, width))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Tokens ``[n, length]`` to features ``[n, length, width]``."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab_size, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.layers))
        self.norm = nn.LayerNorm(config.width)

    def forward(self, tokens: Tensor, cache: Cache | None = None) -> Tensor:
        start = cache.length if cache is not None else 0
        x = self.tokens(tokens) + self.positions(torch.arange(start, start + tokens.shape[1]))
        for block in self.blocks:
            x = block(x, cache)
        return self.norm(x)


class LanguageModel(nn.Module):
    """The policy: logits of the next token, ``[n, length, vocab]``."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.body = GPT(config)
        self.head = nn.Linear(config.width, config.vocab_size)

    def forward(self, tokens: Tensor, cache: Cache | None = None) -> Tensor:
        return self.head(self.body(tokens, cache))


class ValueModel(nn.Module):
    """The critic: the expected return after each token, ``[n, length]``."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.body = GPT(config)
        self.head = nn.Linear(config.width, 1)
        nn.init.zeros_(self.head.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.body(tokens)).squeeze(-1)


@torch.no_grad()
def generate(
    model: LanguageModel, prompts: Tensor, length: int, temperature: float, generator: torch.Generator
) -> Tensor:
    """Sample ``length`` tokens after each prompt: prompts and answers, ``[n, prompt + length]``."""
    cache = Cache(model.body.config.layers)
    tokens = new = prompts
    for _ in range(length):
        logits = model(new, cache)[:, -1] / temperature
        new = torch.multinomial(logits.softmax(-1), 1, generator=generator)
        tokens = torch.cat([tokens, new], dim=1)
    return tokens
