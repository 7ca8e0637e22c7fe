"""Known errors of engines, in tables by subject: each rule is a row with an id, a sentence and a fix."""
