"""One attention turned into the other: MHA/GQA to MLA and back. An approximation, calibrated and measured."""
