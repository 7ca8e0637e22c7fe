"""Write the number of rules in docs/validate.md, and docs/report.schema.json.

    scripts/docs validate            write both
    scripts/docs validate --check    exit 1 if either is not current

The text of docs/validate.md outside its markers is written by hand and stays unchanged.
"""

import argparse
import json
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE, SCHEMA = ROOT / "docs" / "validate.md", ROOT / "docs" / "report.schema.json"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where something would change")
    check = parser.parse_args().check
    page = PAGE.read_text()
    page = put(page, "rules", rules())
    stale = [file for file, text in {PAGE: page, SCHEMA: schema()}.items() if not is_current(file, text, check)]
    for file in stale:
        print(f"{file.relative_to(ROOT)} {'is not current' if check else 'written'}")
    return 1 if check and stale else 0


def is_current(file: Path, text: str, check: bool) -> bool:
    current = file.exists() and file.read_text() == text
    if not current and not check:
        file.write_text(text)
    return current


def put(page: str, name: str, lines: list[str]) -> str:
    """Put lines between the markers of this name."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, _, rest = page.partition(begin)
    return "\n".join([before + begin, *lines, end]) + rest.partition(end)[2]


def schema() -> str:
    """Return the JSON schema of report.json; each key has the meaning that its class gives it."""
    from docs_parts.models import attributes
    from pydantic.json_schema import GenerateJsonSchema

    from kconv.validate.report import Report

    class Described(GenerateJsonSchema):
        def model_schema(self, schema):
            made, meanings = super().model_schema(schema), attributes(schema["cls"])
            for name, key in made.get("properties", {}).items():
                key |= {"description": meanings[name]} if name in meanings else {}
            return made | {"description": made["description"].partition("\n")[0]} if meanings else made

    made = Report.model_json_schema(by_alias=True, mode="serialization", schema_generator=Described)
    return json.dumps(made, indent=2) + "\n"


def rules() -> list[str]:
    """Return how many rules there are, and on how many heads and targets the tests try them."""
    from support.faults import FAULTS
    from support.good_heads import GOOD
    from support.target_faults import FAULTS as TARGET_FAULTS

    from kconv.validate.rules.table import all_rules

    every = all_rules()
    counts = Counter(rule.severity for rule in every.values())
    return [
        f"{len(every)} rules: {counts['error']} errors, {counts['undecided']} undecided, {counts['warning']} warnings, "
        f"{counts['note']} notes. The tests try them on {len(FAULTS)} corruptions of good heads, {len(TARGET_FAULTS)} "
        f"corruptions of good NVFP4 targets, and {len(GOOD)} good heads."
    ]


if __name__ == "__main__":
    sys.exit(main())
