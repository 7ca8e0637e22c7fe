"""Find what looks like a token, a key or a password, in any file.

The patterns are detect-secrets' own, for the services that it knows; without its detectors that guess by entropy or by
a nearby word, which would match every digest of a manifest, and without those that take hours on a few hundred kB of a
stranger's license. Their services, and missing ones, are added here.
https://github.com/Yelp/detect-secrets/tree/v1.5.0/detect_secrets/plugins
"""

from __future__ import annotations

import importlib
import re
from functools import cache
from typing import Any

# Module of detect_secrets.plugins, and its detector.
DETECTORS = {
    "artifactory": "ArtifactoryDetector", "aws": "AWSKeyDetector", "azure_storage_key": "AzureStorageKeyDetector",
    "basic_auth": "BasicAuthDetector", "cloudant": "CloudantDetector", "discord": "DiscordBotTokenDetector",
    "github_token": "GitHubTokenDetector",
    "ibm_cloud_iam": "IbmCloudIamDetector", "ibm_cos_hmac": "IbmCosHmacDetector", "mailchimp": "MailchimpDetector",
    "private_key": "PrivateKeyDetector", "pypi_token": "PypiTokenDetector", "sendgrid": "SendGridDetector",
    "slack": "SlackDetector", "softlayer": "SoftlayerDetector", "square_oauth": "SquareOAuthDetector",
    "stripe": "StripeDetector", "telegram_token": "TelegramBotTokenDetector", "twilio": "TwilioKeyDetector",
}  # fmt: skip
# Tokens of services in this field for which the library has no detector, or none that takes linear time.
MORE = {
    "Hugging Face token": r"(?:hf_(?:jwt_)?|api_org_)[A-Za-z0-9._-]{20,}",
    "GitHub fine-grained token": r"github_pat_\w{30,}",
    "NVIDIA API key": r"nvapi-[\w-]{20,}",
    "Google API key": r"AIza[\w-]{30,}",
    "Anthropic or OpenAI key": r"sk-(?:ant-|proj-)?[A-Za-z0-9_-]{20,}",
    "AWS access key": r"(?:AKIA|ASIA)[A-Z0-9]{16}",
    "GitHub token": r"gh[pousr]_[A-Za-z0-9]{30,}",
    "Weights and Biases key": r"(?i:wandb_api_key)\W{1,4}[0-9a-f]{40}",
    "Slack token": r"xox[abeoprs]-[A-Za-z0-9-]{10,}",
    "GitLab token": r"gl(?:pat|dt|rt|cbt|ptt|ft|imt|agent|oas|soat)-[\w-]{20,}|GR1348941[\w-]{20,}",
    "NPM token": r"/:_authToken=\s*(?:npm_.|[A-Fa-f0-9-]{36})",
    # From the beginning of a run of its letters, so that each run is looked at once; its second part follows a dot.
    "JSON Web Token": r"(?<![\w=-])(?=[\w=-]*+\.[\w=-])[\w=-]*?eyJ[\w=-]",
    "private key": r"-----BEGIN [A-Z ]*PRIVATE KEY",
    "password in an address": r"[\w+.-]://[^\s/:@]+:[^\s/:@]+@",
}


def find_secrets(data: bytes) -> list[str]:
    """Return the kinds of secrets that a file seems to hold, whatever its name and text encoding."""
    return sorted({kind for kind, pattern in _patterns() if any(pattern.search(text) for text in _texts(data))})


def _texts(data: bytes) -> set[str]:
    # In UTF-16 and UTF-32 such a text is its letters with zeros between them. Several patterns of the library allow any
    # number of spaces three times in a row, so a run of them takes cubic time; one space matches the same.
    return {_single_spaced(text).decode("latin-1") for text in {data, data.replace(b"\0", b"")}}


def _single_spaced(text: bytes) -> bytes:
    # An indented file of a megabyte has a hundred thousand runs; each pass halves all of them at once.
    while b"  " in text:
        text = text.replace(b"  ", b" ")
    return text


@cache
def _patterns() -> tuple[tuple[str, re.Pattern[str]], ...]:
    # Imported here: the library imports requests, for which only publishing should wait.
    found: list[tuple[str, re.Pattern[str]]] = [(kind, re.compile(pattern)) for kind, pattern in MORE.items()]
    for module, name in DETECTORS.items():
        detector: Any = getattr(importlib.import_module(f"detect_secrets.plugins.{module}"), name)
        found += [(detector.secret_type, pattern) for pattern in detector.denylist]
    return tuple(found)
