"""What `fusedshard demo` trains: a small byte-level GPT, and the text it reads."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BYTES = 256  # the vocabulary: every byte is a token
CORPUS_LIMIT = 4 << 20  # bytes of text read at most


class Block(nn.Module):
    """One transformer layer: causal attention, then an MLP, each on the normalized residual.

    No layer has a bias: the gradient of a key bias is zero but for rounding, and Adam would turn
    that noise into full-size steps, which tell nothing when two optimizers are compared.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width, bias=False)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width, bias=False)
        self.mlp_in = nn.Linear(width, 4 * width, bias=False)
        self.mlp_out = nn.Linear(4 * width, width, bias=False)

    def attention(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        packed = self.query_key_value(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = packed.permute(2, 0, 3, 1, 4)  # each (batch, heads, length, head width)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x)), approximate="tanh"))


class GPT(nn.Module):
    """A causal language model over bytes whose output layer shares the token embedding.

    Args:
        context: tokens that it can see at once.
        vocabulary: tokens that it knows.
    """

    def __init__(
        self,
        width: int = 256,
        depth: int = 4,
        heads: int = 8,
        context: int = 128,
        vocabulary: int = BYTES,
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # The layers that write to the residual start smaller, the deeper the stack.
                scale = (2 * depth) ** -0.5 if name.endswith("_out.weight") else 1.0
                nn.init.normal_(parameter, std=0.02 * scale)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy, fp32, in nats a token; inputs and targets: int64 (batch, length)."""
        x = self.token(inputs) + self.position.weight[: inputs.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.token.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def standard_library() -> Path:
    """The folder of the running interpreter's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def load_corpus(folder: Path, limit: int = CORPUS_LIMIT) -> bytes:
    """The folder's `.py` files joined in the order of their names, cut at `limit` bytes.

    Raises FileNotFoundError where there is no such file (an interpreter shipped as a zip archive
    or as compiled files only).
    """
    text = b""
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= limit:
            return text[:limit]
    if not text:
        raise FileNotFoundError(
            f"the demo trains on the .py sources of the standard library, and {folder} has none; "
            "use an interpreter installed with its sources"
        )
    return text


class Batches:
    """Random windows of one rank's slice of a text: the same ones each time for the same seed."""

    def __init__(
        self, text: bytes, rank: int, world_size: int, seed: int, batch: int, context: int
    ) -> None:
        share = len(text) // world_size
        piece = text[rank * share : (rank + 1) * share]
        if len(piece) < context + 1:
            raise ValueError(
                f"text of rank {rank}: got {len(piece)} bytes, wanted at least {context + 1}"
            )
        self._bytes = torch.frombuffer(bytearray(piece), dtype=torch.uint8)
        self._window = torch.arange(context + 1)
        self._batch = batch
        self._generator = torch.Generator().manual_seed(seed * world_size + rank)

    def next(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets, int64 (batch, context): a target is the byte after its input."""
        last = len(self._bytes) - len(self._window)
        starts = torch.randint(last + 1, (self._batch, 1), generator=self._generator)
        window = self._bytes[starts + self._window].long()
        return window[:, :-1], window[:, 1:]
