"""A Space: the Hub id of a drafter in, what it is and each engine's verdict out, from config and headers alone."""

from __future__ import annotations

import html
import os
import tempfile

import kconv
from kconv.checkpoint.source import HUB_ID, hub_id_of
from kconv.lines import Facts
from kconv.validate.html import to_html

ABOUT = """# Would an engine serve this draft head?

kconv reads a drafter's config and the headers of its weights, and says for vLLM, SGLang and TensorRT-LLM whether
each would serve it rightly. No weights are read, so this is less than `kconv validate` says on your machine."""
EXAMPLES = [["nvidia/Kimi-K2.6-Eagle3", "moonshotai/Kimi-K2.6"], ["lightseekorg/kimi-k2.6-eagle3-mla", ""]]


# How a page in a page is shown; long names fold on a phone.
REPORT = "iframe { width: 100%; height: 80vh; border: 0 }"
FACTS = (
    "table { width: 100%; table-layout: fixed } th { width: 7em } td { overflow-wrap: anywhere; white-space: pre-line }"
)


def look(head: str, target: str = "", captured_are: str = "") -> tuple[str, str]:
    """Return the report of a drafter's checks, and what it is, as HTML; or an error and nothing.

    Args:
        head: a Hub id, org/name[@revision], or the address of its page.
        target: the same of its target; may be empty.
        captured_are: "inputs" or "outputs" if its files do not say what its list of layers names; otherwise empty.
    """
    for name in filter(None, (head, target)):
        # Only the Hub is looked at, never this machine's files.
        if not HUB_ID.fullmatch(hub_id_of(name.strip())):
            return _paragraphs(f"{name!r} is no Hub id.", "Give org/name, or org/name@revision."), ""
    decided = {"captured_are": captured_are} if captured_are else {}
    asked = decided | ({"target": target.strip()} if target else {})
    try:
        inspected = kconv.inspect(head.strip(), **decided)
        report = kconv.validate(head.strip(), for_=("all",), headers_only=True, **asked)
    except kconv.KconvError as fault:
        return _paragraphs(f"{fault.where}: {fault.what}" if fault.where else fault.what, fault.fix), ""
    facts = next(part for part in inspected.lines() if isinstance(part, Facts))
    rows = "".join(f"<tr><th>{_text(name)}</th><td>{_text(fact)}</td></tr>" for name, fact in facts.facts.items())
    page = html.escape(to_html(report))
    return f'<iframe srcdoc="{page}" sandbox title="report"></iframe>', f"<table>{rows}</table>"


def _paragraphs(*texts: str) -> str:
    return "".join(f"<p>{html.escape(text)}</p>" for text in texts)


def _text(words: str | tuple) -> str:
    parts = (words,) if isinstance(words, str) else words
    return html.escape("".join(part if isinstance(part, str) else part.text for part in parts))


def main() -> None:
    """Serve the page."""
    import gradio

    # A folder of this machine would win over a Hub id of the same name.
    os.chdir(tempfile.mkdtemp())
    with gradio.Blocks(title="kconv") as page:
        gradio.Markdown(ABOUT)
        with gradio.Row():
            head = gradio.Textbox(label="Drafter", placeholder="org/name[@revision]")
            target = gradio.Textbox(label="Target, if its files leave something open", placeholder="org/name")
            layers = gradio.Dropdown(["", "inputs", "outputs"], label="Its list of layers names, if undecided")
        button = gradio.Button("Check", variant="primary")
        report, facts = gradio.HTML(css_template=REPORT), gradio.HTML(css_template=FACTS)
        gradio.Examples(EXAMPLES, [head, target])
        gradio.on([button.click, head.submit, target.submit], look, [head, target, layers], [report, facts])
    page.launch()


if __name__ == "__main__":
    main()
