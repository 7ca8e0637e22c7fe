"""The options of `kconv publish`, which the request and what publishes share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from ...options import Count, Name, argument, option
from ...strict import StrictModel

MAIN = "main"


def _allowed(value: Any) -> Any:
    """Read allowed checks, from a mapping or from words like P109="a reason"."""
    if isinstance(value, Mapping):
        found = {str(rule): str(why) for rule, why in value.items()}
    elif not isinstance(value, (list, tuple)):
        raise ValueError(f"{value!r} is not a list of RULE=REASON")
    else:
        found = {}
        for word in value:
            rule, equals, why = str(word).partition("=")
            if not equals:
                raise ValueError(f"{word!r} is not RULE=REASON")
            found[rule.strip()] = why.strip()
    if unsaid := [rule for rule, why in found.items() if not why]:
        raise ValueError(f"{', '.join(unsaid)} needs a reason, which the card states")
    return found


class PublishOptions(StrictModel):
    """Where to publish a folder and how, by what to judge it, and which acceptance it must reach."""

    repo: str = argument("The repository, org/name.", kind="plain", default="")
    tag: str = option("", "Tag for this release, set after every file was read back.")
    private: bool = option(False, "Refuse a repository that is public.")
    public: bool = option(False, "Make the repository public at the end.")
    revision: str = option("", "Branch to commit to; main by default.")
    create_pr: bool = option(False, "Open a pull request instead of moving the branch.")
    expect_parent: str = option("", "Refuse if the branch is at another commit.", metavar="SHA")
    offline: bool = option(False, "Only run the release checks; ask and change nothing on the Hub.")
    report: Name | None = option(None, "report.json of kconv validate; by default DIR's own.", kind="file")
    acceptance: tuple[Name, ...] = option((), "acceptance.json, repeatable; by default DIR's own.", kind="file")
    facts: Name | None = option(None, "The card's facts file; by default the recipe's.", kind="file")
    min_acceptance: Annotated[float, Field(gt=0)] | None = option(
        None, "Minimum acceptance; by default the recipe's.", metavar="AL"
    )
    metric: str = option("al_incl_bonus", "Its metric.")
    suite: str | None = option(None, "Its suite, e.g. MT-Bench, or a report's text, e.g. sampled.")
    target_name: str | None = option(None, "Its target, as named in acceptance.json.", metavar="NAME")
    temperature: Annotated[float, Field(ge=0)] | None = option(None, "Its temperature.", metavar="T")
    draft_tokens: Count | None = option(None, "Its K.", metavar="K")
    min_prompts: Count | None = option(None, "Fewest prompts.", metavar="N")
    max_loss: Annotated[float, Field(ge=0, lt=1)] | None = option(
        None, "Largest loss against the source, as a share: 0.01 is 1 %.", metavar="SHARE"
    )
    allow: Annotated[dict[str, str], BeforeValidator(_allowed)] = option(
        {}, "Let a check pass; repeatable.", kind="settings",
        metavar="RULE=REASON",
    )  # fmt: skip
    out: Name | None = option(None, "A new folder for the record of the publication.", kind="output")

    @property
    def branch(self) -> str:
        """The branch to commit to."""
        return self.revision or MAIN
