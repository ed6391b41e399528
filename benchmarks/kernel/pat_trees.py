"""The 20 prefix trees of the PAT paper's Figure 10."""

from __future__ import annotations

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


def parse_tree(text: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the number of nodes of each level, and the tokens of a node there.

    ValueError, which quotes the text, if it is not a tree.
    """
    given, _, sizes = text.partition("_")
    try:
        nodes, tokens = (tuple(int(n) for n in part.split(",")) for part in (given, sizes))
    except ValueError:
        raise ValueError(f"a tree looks like 1,4,16_512,64,32; got {text!r}") from None
    if len(nodes) != len(tokens) or min(nodes + tokens) < 1:
        raise ValueError(f"a tree needs as many positive node counts as token counts: {text!r}")
    return nodes, tokens
