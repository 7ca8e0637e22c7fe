"""What a server says of how it drafts."""

from __future__ import annotations

import json
from typing import Any

from ..errors import DefinitionsMixed
from .server import ChatServer

# SGLang's /server_info repeats the arguments that it was started with; of vLLM and TensorRT-LLM counters alone tell.
# https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt/entrypoints/http_server.py#L863-L885
STEPS, BRANCHES = "speculative_num_steps", "speculative_eagle_topk"
ARGUMENTS = (STEPS, BRANCHES, "speculative_draft_model_path")
PATH = "/server_info"


def check_told(server: ChatServer, draft_tokens: int, tree: str) -> dict[str, Any]:
    """Hold K and the tree against what a server says of itself, and return what it says; empty where it says nothing.

    Args:
        server: which is measured.
        draft_tokens: K, as the user says it.
        tree: "chain", or "topk=N" where drafts branch, as the user says it.

    Raises:
        DefinitionsMixed: the server says otherwise.
    """
    try:
        said = json.loads(server.page(PATH))
    except ValueError:
        said = None
    told = {name: said[name] for name in ARGUMENTS if said.get(name) is not None} if isinstance(said, dict) else {}
    if told.get(STEPS, draft_tokens) != draft_tokens:
        raise DefinitionsMixed(
            f"the server drafts {told[STEPS]} tokens in a chain, and K is said to be {draft_tokens}",
            where=server.url,
            fix=f"Say K = {told[STEPS]} (bench: --draft-tokens, validate: --steps).",
        )
    branches = told.get(BRANCHES)
    drafted = "chain" if branches == 1 else f"topk={branches}"
    if branches is not None and tree != drafted:
        raise DefinitionsMixed(
            f"the server drafts with top-k {branches}, and the tree is said to be {tree!r}",
            where=server.url,
            fix=f"Say so (bench: --tree {drafted}), or, for validate, start the server with top-k 1.",
        )
    return told
