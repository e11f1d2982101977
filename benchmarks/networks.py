"""Networks in plain torch whose attention function can be exchanged: a Llama, a vision transformer, blocks of Flux."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .variants import Attend

# Queries longer than a fresh initialisation makes them: scores with a standard deviation around two, as trained models
# have them, so that the softmax is not flat and attention matters to the output.
QUERY_GAIN = 2.0


def initialize(network: nn.Module) -> None:
    """Weights as published models start from: normal, standard deviation 0.02, biases zero."""
    for module in network.modules():
        if isinstance(module, nn.Linear | nn.Embedding | nn.Conv2d):
            nn.init.normal_(module.weight, std=0.02)
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)


def rotary_table(length: int, head_dim: int, base: float, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines (length, head_dim) of rotary position embedding, the halves alike."""
    frequencies = base ** (-torch.arange(0, head_dim, 2, device=like.device) / head_dim)
    angles = torch.arange(length, device=like.device)[:, None] * frequencies
    angles = torch.cat([angles, angles], dim=1)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotate(tensor: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary position embedding of (B, H, L, D), by halves."""
    first, second = tensor.chunk(2, dim=-1)
    return tensor * table[0] + torch.cat([-second, first], dim=-1) * table[1]


def heads_of(tensor: Tensor, heads: int) -> Tensor:
    """(B, L, H * D) as (B, H, L, D), a view."""
    return tensor.unflatten(-1, (heads, -1)).transpose(1, 2)


class LlamaLayer(nn.Module):
    def __init__(self, attend: Attend, hidden: int, heads: int, heads_k: int, feed_forward: int) -> None:
        super().__init__()
        self.attend, self.heads, self.heads_k = attend, heads, heads_k
        head_dim = hidden // heads
        self.attention_norm, self.feed_forward_norm = (nn.RMSNorm(hidden, eps=1e-5) for _ in range(2))
        self.query = nn.Linear(hidden, heads * head_dim, bias=False)
        self.key, self.value = (nn.Linear(hidden, heads_k * head_dim, bias=False) for _ in range(2))
        self.out = nn.Linear(heads * head_dim, hidden, bias=False)
        self.gate, self.up = (nn.Linear(hidden, feed_forward, bias=False) for _ in range(2))
        self.down = nn.Linear(feed_forward, hidden, bias=False)

    def forward(self, hidden: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
        normed = self.attention_norm(hidden)
        query = rotate(heads_of(self.query(normed), self.heads), table)
        key = rotate(heads_of(self.key(normed), self.heads_k), table)
        value = heads_of(self.value(normed), self.heads_k)
        attended = self.attend(query, key, value, causal=True)
        hidden = hidden + self.out(attended.transpose(1, 2).flatten(2))
        normed = self.feed_forward_norm(hidden)
        return hidden + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Llama(nn.Module):
    """A causal language model. Tokens (B, L) to the logits of the last position, (B, vocabulary)."""

    def __init__(
        self, attend: Attend, layers: int, hidden: int, heads: int, heads_k: int, feed_forward: int, vocabulary: int
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.layers = nn.ModuleList(LlamaLayer(attend, hidden, heads, heads_k, feed_forward) for _ in range(layers))
        self.norm = nn.RMSNorm(hidden, eps=1e-5)
        self.head_dim = hidden // heads
        initialize(self)
        for layer in self.layers:
            layer.query.weight.data.mul_(QUERY_GAIN)

    def hidden(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens) * self.embedding.weight.shape[1] ** 0.5
        table = rotary_table(tokens.shape[1], self.head_dim, 5e5, hidden)
        for layer in self.layers:
            hidden = layer(hidden, table)
        return self.norm(hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.linear(self.hidden(tokens)[:, -1], self.embedding.weight)

    def loss(self, tokens: Tensor) -> Tensor:
        """The mean cross-entropy of each next token; the output weights are the embedding's."""
        logits = F.linear(self.hidden(tokens)[:, :-1], self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


class EncoderLayer(nn.Module):
    def __init__(self, attend: Attend, hidden: int, heads: int) -> None:
        super().__init__()
        self.attend, self.heads = attend, heads
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(2))
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, hidden: Tensor) -> Tensor:
        query, key, value = (heads_of(part, self.heads) for part in self.qkv(self.norms[0](hidden)).chunk(3, dim=2))
        hidden = hidden + self.out(self.attend(query, key, value).transpose(1, 2).flatten(2))
        return hidden + self.down(F.gelu(self.up(self.norms[1](hidden))))


class VisionTransformer(nn.Module):
    """Images (B, 3, S, S) to features (B, hidden), those of a class token."""

    def __init__(self, attend: Attend, layers: int, hidden: int, heads: int, image: int, patch: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, hidden, patch, patch)
        self.class_token = nn.Parameter(torch.randn(1, 1, hidden) * 0.02)
        self.positions = nn.Parameter(torch.randn(1, 1 + (image // patch) ** 2, hidden) * 0.02)
        self.layers = nn.ModuleList(EncoderLayer(attend, hidden, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        initialize(self)
        for layer in self.layers:
            layer.qkv.weight.data[:hidden].mul_(QUERY_GAIN)

    def forward(self, images: Tensor) -> Tensor:
        words = self.patches(images).flatten(2).transpose(1, 2)
        hidden = torch.cat([self.class_token.expand(len(images), -1, -1), words], dim=1) + self.positions
        for layer in self.layers:
            hidden = layer(hidden)
        return self.norm(hidden[:, 0])

    def loss(self, images: Tensor) -> Tensor:
        """Something to differentiate: how far the features are from a ramp."""
        features = self(images).float()
        return (features - torch.linspace(-1, 1, features.shape[1], device=features.device)).square().mean()


class DoubleBlock(nn.Module):
    """Image and text with weights of their own, joined in the attention."""

    def __init__(self, attend: Attend, hidden: int, heads: int) -> None:
        super().__init__()
        self.attend, self.heads = attend, heads

        def each(make: object) -> nn.ModuleList:
            return nn.ModuleList(make() for _ in range(2))  # type: ignore[operator]

        self.modulation = each(lambda: nn.Linear(hidden, 6 * hidden))
        self.norm = nn.LayerNorm(hidden, elementwise_affine=False, eps=1e-6)
        self.qkv, self.out = each(lambda: nn.Linear(hidden, 3 * hidden)), each(lambda: nn.Linear(hidden, hidden))
        self.query_norm, self.key_norm = (each(lambda: nn.RMSNorm(hidden // heads, eps=1e-6)) for _ in range(2))
        self.up, self.down = each(lambda: nn.Linear(hidden, 4 * hidden)), each(lambda: nn.Linear(4 * hidden, hidden))

    def forward(self, streams: list[Tensor], condition: Tensor, table: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        changes = [make(F.silu(condition))[:, None].chunk(6, dim=2) for make in self.modulation]
        operands = []
        for n, (stream, change) in enumerate(zip(streams, changes, strict=True)):
            parts = self.qkv[n](self.norm(stream) * (1 + change[0]) + change[1]).chunk(3, dim=2)
            query, key, value = (heads_of(part, self.heads) for part in parts)
            operands.append((self.query_norm[n](query), self.key_norm[n](key), value))
        query, key, value = (torch.cat(joined, dim=2) for joined in zip(*operands, strict=True))
        attended = self.attend(rotate(query, table), rotate(key, table), value).transpose(1, 2).flatten(2)
        results = []
        for n, part in enumerate(attended.split([stream.shape[1] for stream in streams], dim=1)):
            stream = streams[n] + changes[n][2] * self.out[n](part)
            normed = self.norm(stream) * (1 + changes[n][3]) + changes[n][4]
            results.append(stream + changes[n][5] * self.down[n](F.gelu(self.up[n](normed), approximate="tanh")))
        return tuple(results)


class SingleBlock(nn.Module):
    """Text and image as one sequence, attention and feed-forward side by side."""

    def __init__(self, attend: Attend, hidden: int, heads: int) -> None:
        super().__init__()
        self.attend, self.heads, self.hidden = attend, heads, hidden
        self.modulation = nn.Linear(hidden, 3 * hidden)
        self.norm = nn.LayerNorm(hidden, elementwise_affine=False, eps=1e-6)
        self.into, self.out = nn.Linear(hidden, 7 * hidden), nn.Linear(5 * hidden, hidden)
        self.query_norm, self.key_norm = (nn.RMSNorm(hidden // heads, eps=1e-6) for _ in range(2))

    def forward(self, stream: Tensor, condition: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
        scale, shift, gate = self.modulation(F.silu(condition))[:, None].chunk(3, dim=2)
        wide = self.into(self.norm(stream) * (1 + scale) + shift)
        query, key, value = (heads_of(part, self.heads) for part in wide[..., : 3 * self.hidden].chunk(3, dim=2))
        query, key = rotate(self.query_norm(query), table), rotate(self.key_norm(key), table)
        attended = self.attend(query, key, value).transpose(1, 2).flatten(2)
        both = torch.cat([attended, F.gelu(wide[..., 3 * self.hidden :], approximate="tanh")], dim=2)
        return stream + gate * self.out(both)


class FluxBlocks(nn.Module):
    """One double and two single blocks, the proportion of Flux.1. (image, text, condition) to (B, L, hidden)."""

    def __init__(self, attend: Attend, hidden: int, heads: int) -> None:
        super().__init__()
        self.double_block = DoubleBlock(attend, hidden, heads)
        self.single_blocks = nn.ModuleList(SingleBlock(attend, hidden, heads) for _ in range(2))
        self.head_dim = hidden // heads
        initialize(self)
        for norm in [*self.double_block.query_norm, *(block.query_norm for block in self.single_blocks)]:
            norm.weight.data.mul_(QUERY_GAIN)

    def forward(self, image: Tensor, text: Tensor, condition: Tensor) -> Tensor:
        table = rotary_table(image.shape[1] + text.shape[1], self.head_dim, 1e4, image)
        hidden = torch.cat(self.double_block([text, image], condition, table), dim=1)
        for block in self.single_blocks:
            hidden = block(hidden, condition, table)
        return hidden
