"""What engines are known to get wrong, each fault a small function with an id, a sentence and a fix."""
