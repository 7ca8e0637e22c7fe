"""Licenses of heads and targets: data, the files that follow from them, and checks of a folder."""
