"""Batches of requests to time servers with. The requests of a batch start together."""

from __future__ import annotations

import random
from dataclasses import dataclass

FIRST_TOKEN = 256  # lower ids are special tokens in some models


@dataclass(frozen=True, slots=True)
class Case:
    """A batch of requests to time.

    There are `groups` prefixes of `prefix` tokens, and `batch / groups` requests share each prefix.
    A request has `private` more prompt tokens and generates `generated` tokens. With temperature 0,
    the answers of two servers can be compared.
    """

    batch: int
    prefix: int
    private: int
    generated: int
    groups: int = 1
    temperature: float = 0.0

    def prompts(self, vocab_size: int) -> list[list[int]]:
        """Return prompts of random tokens, the same for every server, ordered by group."""
        source = random.Random(0)

        def tokens(count: int) -> list[int]:
            return source.choices(range(FIRST_TOKEN, vocab_size - FIRST_TOKEN), k=count)

        prefixes = [tokens(self.prefix) for _ in range(self.groups)]
        per_group = self.batch // self.groups
        return [prefixes[i // per_group] + tokens(self.private) for i in range(self.batch)]

    @property
    def pool_tokens(self) -> int:
        """Number of KV slots that the whole batch needs."""
        return self.groups * self.prefix + self.batch * (self.private + self.generated)

    @property
    def title(self) -> str:
        requests = "1 request" if self.batch == 1 else f"{self.batch} requests"
        groups = f"{self.groups} x " if self.groups > 1 else ""
        return f"{requests}, {groups}{self.prefix} shared + {self.private} private"
