"""Find what looks like a token, a key or a password, in any file.

The patterns are detect-secrets' own, for the services that it knows; without its detectors that guess by entropy or by
a nearby word, which would match every digest of a manifest. Missing services are added here.
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
    "github_token": "GitHubTokenDetector", "gitlab_token": "GitLabTokenDetector",
    "ibm_cloud_iam": "IbmCloudIamDetector", "ibm_cos_hmac": "IbmCosHmacDetector", "jwt": "JwtTokenDetector",
    "mailchimp": "MailchimpDetector", "npm": "NpmDetector", "openai": "OpenAIDetector",
    "private_key": "PrivateKeyDetector", "pypi_token": "PypiTokenDetector", "sendgrid": "SendGridDetector",
    "slack": "SlackDetector", "softlayer": "SoftlayerDetector", "square_oauth": "SquareOAuthDetector",
    "stripe": "StripeDetector", "telegram_token": "TelegramBotTokenDetector", "twilio": "TwilioKeyDetector",
}  # fmt: skip
# Tokens of services in this field for which the library has no detector.
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
    "GitLab token": r"gl(?:pat|dt|rt|cbt|ptt|ft|imt|agent|oas|soat)-[\w-]{20,}",
    "private key": r"-----BEGIN [A-Z ]*PRIVATE KEY",
    "password in an address": r"[a-zA-Z][\w+.-]*://[^\s/:@]+:[^\s/:@]+@",
}


def find_secrets(data: bytes) -> list[str]:
    """Return the kinds of secrets that a file seems to hold, whatever its name and text encoding."""
    # In UTF-16 and UTF-32 such a text is its letters with zeros between them.
    texts = {data.decode("latin-1"), data.replace(b"\0", b"").decode("latin-1")}
    return sorted({kind for kind, pattern in _patterns() if any(pattern.search(text) for text in texts)})


@cache
def _patterns() -> tuple[tuple[str, re.Pattern[str]], ...]:
    # Imported here: the library imports requests, for which only publishing should wait.
    found: list[tuple[str, re.Pattern[str]]] = [(kind, re.compile(pattern)) for kind, pattern in MORE.items()]
    for module, name in DETECTORS.items():
        detector: Any = getattr(importlib.import_module(f"detect_secrets.plugins.{module}"), name)
        found += [(detector.secret_type, pattern) for pattern in detector.denylist]
    return tuple(found)
