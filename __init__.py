"""kconv: an Eagle3 draft head, from the trainer to the engines, with proof at every step."""
