"""Texts that kconv takes for licenses: not the licenses' own, which are others', but what it knows them by."""

NVIDIA = "NVIDIA Open Model License Agreement\nof a Derivative Model, and so on.\n"
MIT = (
    "MIT License\n\nCopyright (c) 2025 Someone\n\nPermission is hereby granted, free of charge, ...\n"
    "all copies or substantial portions of the Software.\n"
)
KIMI = (
    "Modified MIT License\n\nCopyright (c) 2025 Moonshot AI\n\nPermission is hereby granted, free of\ncharge, ... "
    "substantial portions of the Software ... you shall prominently\n"
    "display “Kimi K2.6” on the user\ninterface of it.\n"
)
APACHE = "Apache License\n  Version 2.0, January 2004\n"
TEXTS = {"nvidia-open-model-license": NVIDIA, "modified-mit": KIMI, "mit": MIT, "apache-2.0": APACHE}
