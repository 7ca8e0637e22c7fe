"""Charts read on white and on black: contrasts by WCAG's own formula, and pictures without a ground."""

import pytest

from kconv.charts import COLOURS, INK, chart

# Paper, the dark ground of the docs' site, GitHub's dark ground, black.
GROUNDS = ("#ffffff", "#1e2129", "#0d1117", "#000000")


def luminance(colour: str) -> float:
    """Relative luminance, https://www.w3.org/TR/WCAG22/#dfn-relative-luminance."""
    shares = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (s / 12.92 if s <= 0.04045 else ((s + 0.055) / 1.055) ** 2.4 for s in shares)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    """Contrast ratio, https://www.w3.org/TR/WCAG22/#dfn-contrast-ratio."""
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("ground", GROUNDS)
@pytest.mark.parametrize("colour", sorted({INK, *COLOURS}))
def test_a_colour_stands_out_on_every_ground(colour, ground):
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast(colour, ground) >= 3


def test_a_chart_has_no_ground_and_no_other_colours(tmp_path):
    image = pytest.importorskip("matplotlib.image")
    with chart(tmp_path / "a.png", panels=2) as (figure, [left, right]):
        left.bar([0, 1], [1, 2], label="one")
        right.plot([0, 1], [1, 2], label="other")
        right.set(title="title", xlabel="x", ylabel="y")
        figure.legend(loc="outside upper center")
    pixels = image.imread(tmp_path / "a.png")
    assert (pixels[0, 0, 3], pixels[-1, -1, 3]) == (0, 0)
    solid = {"#" + bytes((255 * row[:3]).round().astype("uint8")).hex() for row in pixels[pixels[..., 3] == 1]}
    assert {"#0082c8", INK} <= solid
    assert max(contrast("#ffffff", colour) for colour in solid) < 7, "black ink would vanish on black"


def test_a_chart_that_is_not_drawn_to_its_end_is_not_written(tmp_path):
    with pytest.raises(ZeroDivisionError), chart(tmp_path / "a.png") as (_, [axes]):
        axes.plot([1 / 0])
    assert not (tmp_path / "a.png").exists()
