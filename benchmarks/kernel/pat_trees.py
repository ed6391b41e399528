"""The 20 prefix trees of the PAT paper's Figure 10."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sglang_pat.batch import DecodeBatch, IntArray, PathNode, PrefixPaths

# The 20 trees of Figure 10 of the PAT paper, in its order. The last two share nothing.
PAT_TREES = (
    "1,10_4096,416",
    "1,256_256,32",
    "1,1024_2048,32",
    "1,2,64_1024,256,256",
    "1,4,256_32,256,32",
    "1,8,512_32,512,256",
    "1,8,512_32,2048,256",
    "1,8,512_512,512,256",
    "1,4,8,256_32,256,256,32",
    "1,4,16,512_1024,256,128,32",
    "1,4,16,64,256,1024_256,32,256,64,32,256",
    "1,16,32,64,128,1024_256,128,64,32,32,32",
    "1,16,32,64,256,1024_256,128,64,32,32,32",
    "1,8,16,32,64,128,1024_256,128,64,32,32,32,32",
    "1,8,16,32,64,256,1024_256,128,64,32,32,32,32",
    "2,8,16,256_256,256,32,32",
    "4,16,256,512_512,32,128,32",
    "8,16,32,256_512,512,256,32",
    "256_1024",
    "256_4096",
)


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """nodes[i] nodes of tokens[i] tokens each on level i."""

    nodes: tuple[int, ...]
    tokens: tuple[int, ...]

    @classmethod
    def parse(cls, text: str) -> PrefixTree:
        """ValueError, naming the text, if it is no tree."""
        nodes, _, tokens = text.partition("_")
        try:
            tree = cls(*(tuple(int(n) for n in part.split(",")) for part in (nodes, tokens)))
        except ValueError:
            raise ValueError(f"a tree looks like 1,4,16_512,64,32; got {text!r}") from None
        if len(tree.nodes) != len(tree.tokens) or min(tree.nodes + tree.tokens) < 1:
            raise ValueError(f"a tree needs as many positive node counts as token counts: {text!r}")
        return tree

    @property
    def num_requests(self) -> int:
        return self.nodes[-1]

    @property
    def seq_len(self) -> int:
        return sum(self.tokens)

    @property
    def num_tokens(self) -> int:
        """KV tokens of all nodes: what has to be read at least."""
        return sum(n * t for n, t in zip(self.nodes, self.tokens, strict=True))

    @property
    def is_shared(self) -> bool:
        return len(self.nodes) > 1

    def paths(self) -> list[list[PathNode]]:
        """Per request, its nodes down to the last shared level."""
        begins = np.cumsum((0, *self.tokens))
        first_id = np.cumsum((0, *self.nodes))
        return [
            [
                PathNode(
                    int(first_id[level]) + request * count // self.num_requests,
                    int(begins[level]),
                    int(begins[level + 1]),
                )
                for level, count in enumerate(self.nodes[:-1])
            ]
            for request in range(self.num_requests)
        ]

    def batch(self) -> DecodeBatch:
        """The batch, keyed so that it is planned once."""
        seq_lens = np.full(self.num_requests, self.seq_len, dtype=np.int32)
        return DecodeBatch(seq_lens, PrefixPaths.from_lists(self.paths()), key=self)

    def token_table(self, *, page_size: int = 1, seed: int | None = None) -> IntArray:
        """req_to_token: int32 `[num_requests, seq_len]`.

        Nodes begin at page boundaries; the page of slot 0 is left out. With a seed, pages are
        scattered over the pool, else they ascend.
        """
        pages = [-(-t // page_size) for t in self.tokens]
        total = sum(n * p for n, p in zip(self.nodes, pages, strict=True))
        order = np.arange(total) if seed is None else np.random.default_rng(seed).permutation(total)
        page_begin = (order + 1) * page_size
        table = np.empty((self.num_requests, self.seq_len), dtype=np.int32)
        first_page = column = 0
        for count, tokens, node_pages in zip(self.nodes, self.tokens, pages, strict=True):
            level = page_begin[first_page : first_page + count * node_pages]
            slots = (level[:, None] + np.arange(page_size)).reshape(count, -1)[:, :tokens]
            node_of = np.arange(self.num_requests) * count // self.num_requests
            table[:, column : column + tokens] = slots[node_of]
            first_page += count * node_pages
            column += tokens
        return table

    def pool_size(self, *, page_size: int = 1) -> int:
        """Slots that token_table refers to, slot 0 included."""
        pages = sum(n * -(-t // page_size) for n, t in zip(self.nodes, self.tokens, strict=True))
        return (pages + 1) * page_size
