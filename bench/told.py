"""What a server says of how it drafts."""

from __future__ import annotations

import json
from typing import Any

from ..engines.client import Client
from ..engines.registry import engines
from ..errors import DefinitionsMixed


def check_told(server: Client, draft_tokens: int, tree: str) -> dict[str, Any]:
    """Hold K and the tree against what a server says of itself, and return what it says; empty where it says nothing.

    Args:
        server: which is measured.
        draft_tokens: K, as the user says it.
        tree: "chain", or "topk=N" where drafts branch, as the user says it.

    Raises:
        DefinitionsMixed: the server says otherwise.
    """
    told: dict[str, Any] = {}
    for drafting in (engine.drafting for engine in engines() if engine.drafting):
        try:
            said = json.loads(server.page(drafting.path))
        except ValueError:
            continue
        own = (
            {name: said[name] for name in drafting.keys if said.get(name) is not None} if isinstance(said, dict) else {}
        )
        told |= own
        steps, branches = own.get(drafting.steps, draft_tokens), own.get(drafting.branches)
        if steps != draft_tokens:
            raise DefinitionsMixed(
                f"the server drafts {steps} tokens in a chain, and K is said to be {draft_tokens}",
                where=server.url,
                fix=f"Say K = {steps} (bench: --draft-tokens, validate: --steps).",
            )
        drafted = "chain" if branches == 1 else f"topk={branches}"
        if branches is not None and tree != drafted:
            raise DefinitionsMixed(
                f"the server drafts with top-k {branches}, and the tree is said to be {tree!r}",
                where=server.url,
                fix=f"Say so (bench: --tree {drafted}), or, for validate, start the server with top-k 1.",
            )
    return told
