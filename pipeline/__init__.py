"""Steps in a row; the demo is one of them."""
