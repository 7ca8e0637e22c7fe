"""Publish a finished folder as a tagged repository on the Hub, with every step checked."""
