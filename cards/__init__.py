"""The model card and what it must carry."""
