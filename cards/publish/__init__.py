"""From a finished folder to a tagged repository on the Hub, and nothing unproven on the way."""
