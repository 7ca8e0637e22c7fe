"""Convert one attention into the other: MHA/GQA to MLA and back. An approximation, calibrated and measured."""
