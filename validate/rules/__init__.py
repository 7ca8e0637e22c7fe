"""What engines are known to get wrong, in tables by subject: each rule a row with an id, a sentence and a fix."""
