"""What the stored states of the tests are of."""

CAPTURED = (1, 3, 5)
TEXTS = (
    ("docs", "Return the number of items in a container, or raise TypeError."),
    ("docs", "A context manager that suppresses any of the given exceptions if they occur in its body."),
    ("help", "The statement raises an exception where nothing else is said, and does so again."),
    ("help", "Names refer to objects. Names are introduced by name binding operations of many kinds."),
)
