"""report.html: the verdict of each engine, what was checked for it, escaped, and readable in a real browser."""

from __future__ import annotations

import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest
from support.releases import report

from kconv.measure.figures import Figures
from kconv.validate.html import to_html
from kconv.validate.markdown import to_markdown
from kconv.validate.numbers import EXACT, plain
from kconv.validate.report import UNREAD, Finding, Report
from kconv.validate.rules.table import OF_COMPARISON

EVIL = "</td><script>alert(1)</script><img src=x onerror=alert(1)>&quot;"


def finding(rule: str, severity, *engines: str, **changes) -> Finding:
    told = {"where": "config.json", "message": "m", "fix": "f", **changes}
    return Finding(rule=rule, severity=severity, engines=engines, **told)


# K140 is about captured layers; K204 about values, of all engines.
FINDINGS = (finding("K140", "error", "vllm-v1"), finding("K204", "warning"), finding("K195", "note", "sglang"))
WEIGHTS = {"model.safetensors": "0" * 64}
ASKED = {"for": ["vllm-v1", "vllm-v2", "sglang", "trtllm"]}


def judged(**changes) -> Report:
    about = {"subject": "head", "findings": FINDINGS, "weights": WEIGHTS, "provenance": ASKED}
    return Report(**{**about, **changes})


class Page(HTMLParser):
    """The cells of each table's rows, and every element with its attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self._cell = False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag == "tr":
            self.rows.append([])
        self._cell = tag in ("td", "th")
        if self._cell:
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        self._cell = self._cell and tag not in ("td", "th")

    def handle_data(self, data):
        if self._cell:
            self.rows[-1][-1] += data


def test_each_engine_has_its_verdict_and_a_finding_of_none_is_of_all():
    found = {one.engine: (one.outcome, one.errors, one.warnings) for one in judged().verdicts}
    assert found == {"vLLM": ("fail", 1, 1), "SGLang": ("pass", 0, 1), "TensorRT-LLM": ("pass", 0, 1)}
    assert judged(provenance={}).verdicts == ()


def test_the_verdicts_stand_before_everything_else():
    text = to_html(judged())
    assert text.index("FAIL: 1 error, 1 warning") < text.index("<h2>")
    lines = to_markdown(judged()).splitlines()
    assert lines[4:9] == [
        "| engine | verdict |", "|---|---|", "| vLLM | FAIL: 1 error, 1 warning |", "| SGLang | PASS: 1 warning |",
        "| TensorRT-LLM | PASS: 1 warning |",
    ]  # fmt: skip


def test_the_matrix_says_of_each_subject_what_it_came_to_for_each_engine():
    rows = {row[0]: row[1:] for row in Page(to_html(judged())).rows}
    assert rows["Subject"] == ["vLLM", "SGLang", "TensorRT-LLM"]
    assert rows["Captured layers"] == ["1 error", "passed", "passed"]
    assert rows["Values of the weights"] == ["1 warning"] * 3
    assert rows["RoPE"] == ["passed"] * 3
    both = (*FINDINGS, finding("K143", "warning"))
    beside = {row[0]: row[1:] for row in Page(to_html(judged(findings=both))).rows}
    assert beside["Captured layers"] == ["1 error, 1 warning", "1 warning", "1 warning"]
    # No source was given, and it is no target.
    assert OF_COMPARISON not in rows and "NVFP4 tensors" not in rows
    noted = (*FINDINGS, finding("K315", "note"))
    assert OF_COMPARISON not in {row[0] for row in Page(to_html(judged(findings=noted))).rows}


@pytest.mark.parametrize(("layout", "shown"), [("vllm", False), ("dflash-vllm", True), ("nobody's", False)])
def test_rules_of_another_family_are_not_said_to_have_passed(layout, shown):
    rows = {row[0]: row[1:] for row in Page(to_html(judged(findings=(), provenance=ASKED | {"layout": layout}))).rows}
    assert ("DFlash drafter" in rows) is shown and rows["RoPE"] == ["passed"] * 3


def test_what_was_not_read_is_not_said_to_have_passed():
    headers = {row[0]: row[1:] for row in Page(to_html(judged(findings=(), weights={}))).rows}
    assert headers["Values of the weights"] == ["not checked"] * 3 and headers["RoPE"] == ["passed"] * 3
    unread = {row[0]: row[1:] for row in Page(to_html(judged(provenance=ASKED | {UNREAD: "it is no head"}))).rows}
    assert unread["RoPE"] == ["not checked"] * 3 and unread["Captured layers"][0] == "1 error"


def test_errors_and_warnings_are_open_and_notes_are_folded():
    folded = [attrs for tag, attrs in Page(to_html(judged())).elements if tag == "details"]
    assert ["open" in attrs for attrs in folded] == [True, True, False]


def test_what_a_stranger_wrote_stays_text():
    evil = finding("K140", "error", where=EVIL, message=EVIL, fix=EVIL, seen_in="javascript:alert(1)")
    made = judged(subject=EVIL, findings=(evil,), provenance=ASKED | {EVIL: {EVIL: [EVIL]}}, weights={EVIL: EVIL})
    page = Page(to_html(made))
    tags = {tag for tag, _ in page.elements}
    assert not tags & {"script", "img"} and not any("href" in attrs for _, attrs in page.elements)
    assert not any(name.startswith("on") for _, attrs in page.elements for name in attrs)


def test_it_needs_nothing_from_elsewhere():
    page = Page(to_html(report().model_copy(update={"findings": FINDINGS, "provenance": ASKED})))
    loads = [(tag, attrs) for tag, attrs in page.elements if tag in ("link", "script", "iframe") or "src" in attrs]
    assert not loads
    [policy] = [a["content"] for t, a in page.elements if t == "meta" and "http-equiv" in a]
    assert policy == "default-src 'none'; style-src 'unsafe-inline'"


def test_a_chart_has_a_dot_and_an_interval_for_each_figure():
    figures = report().figures
    page = Page(to_html(report()))
    dots = [attrs for tag, attrs in page.elements if tag == "circle"]
    assert len(dots) == len(figures.acceptance) + len(figures.acceptance_by_category)
    bars = [a for tag, a in page.elements if tag == "line" and (a["class"] or "").startswith("s")]
    assert len(bars) == len(dots)
    # 1 to 4 over 400 units from 170: 2.0 stands a third of the way, and its interval 0.098 to each side.
    assert float(dots[0]["cx"] or 0) == pytest.approx(170 + 400 / 3, abs=0.1)
    assert float(bars[0]["x2"] or 0) - float(bars[0]["x1"] or 0) == pytest.approx(2 * 1.96 * 0.05 / 3 * 400, abs=0.2)


def test_exact_parity_is_a_line_and_not_a_table_of_zeros():
    full = report(part_error=0.0)
    same = [row.model_copy(update={"rms_error": 0.0}) for row in full.figures.parity]
    exact = full.figures.model_copy(update={"identical": True, "parity": tuple(same), "parity_by_category": ()})
    made = full.model_copy(update={"figures": exact})
    for text in (to_html(made), to_markdown(made)):
        assert text.count(EXACT) == 1 and "KL" not in text
    assert sum(tag == "circle" for tag, _ in Page(to_html(made)).elements) == 9, "one drafter, as both are the same"


def test_a_report_without_figures_is_a_page_too():
    text = to_html(Report(subject="head", figures=Figures()))
    assert "No errors: 0 warnings, 0 notes." in text and "<svg" not in text


def test_values_are_written_as_a_person_reads_them():
    assert plain({"file": "p.jsonl", "sizes": [1, 2]}) == "file p.jsonl, sizes 1, 2"
    assert plain({"source": None, "headers_only": False, "read": True}) == "source none, headers_only no, read yes"
    assert plain([0, 1]) == "0, 1"


def test_a_long_name_in_a_chart_has_room_or_is_cut():
    full = report()
    long = [row.model_copy(update={"category": "x" * 40}) for row in full.figures.acceptance]
    made = full.model_copy(update={"figures": full.figures.model_copy(update={"acceptance": tuple(long)})})
    page = Page(text := to_html(made))
    names = [attrs for tag, attrs in page.elements if tag == "text" and attrs["class"] == "name"]
    assert "x" * 31 + "…" in text and "x" * 32 not in text.partition("<svg")[2]
    assert float(names[0]["x"] or 0) >= 32 * 9.5


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
# The contrast that WCAG 2 asks of text, as luminances.
CONTRAST = """() => {
  const channel = v => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = c => { const [r, g, b] = c.match(/[\\d.]+/g).map(Number); return 0.2126 * channel(r) + 0.7152 *
    channel(g) + 0.0722 * channel(b) };
  const ground = e => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor;
    if (c !== 'rgba(0, 0, 0, 0)') return c } };
  return Math.min(...[...document.querySelectorAll('p, td, th, b, span, dt, dd, a, text')].map(e => {
    const ink = e.tagName === 'text' ? getComputedStyle(e).fill : getComputedStyle(e).color;
    const [a, b] = [light(ink), light(ground(e))].sort((x, y) => y - x); return (a + 0.05) / (b + 0.05) }));
}"""


@pytest.mark.slow
@pytest.mark.skipif(not CHROMIUM, reason="no Chromium on this machine: apt-get install chromium")
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390, 320])
def test_in_a_real_browser_it_is_readable_and_its_findings_open(tmp_path: Path, scheme, width):
    from playwright.sync_api import sync_playwright

    long = {"where": "model.layers.0.self_attn.q_a_layernorm.weight" * 3, "seen_in": f"https://there/{'a' * 200}"}
    findings = (*FINDINGS, finding("K302", "warning", **long))
    about = ASKED | {"prompts": {"file": "/a/long/path/" * 9, "sha256": "0" * 64}}
    made = report().model_copy(update={"findings": findings, "weights": WEIGHTS, "provenance": about})
    (tmp_path / "report.html").write_text(to_html(made), encoding="utf-8")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
        asked, said = [], []
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda message: said.append(message.text))
        page.goto((tmp_path / "report.html").as_uri())
        # Wide tables scroll in themselves; the page does not.
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == {
            "light": "rgb(255, 255, 255)", "dark": "rgb(20, 22, 26)",
        }[scheme]  # fmt: skip
        assert page.evaluate(CONTRAST) >= 4.5
        assert page.locator(".verdicts li").first.bounding_box()["y"] < 400
        folded = page.locator("details").nth(3)
        hidden = folded.locator("p").first
        assert not hidden.is_visible()
        folded.locator("summary").click()
        assert hidden.is_visible()
        assert len(asked) == 1 and not said
        browser.close()
