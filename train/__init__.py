"""Eagle3 training with ModelOpt's hooks."""
