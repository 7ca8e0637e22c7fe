"""Safetensors folders: headers, the streaming reader and writer, the manifest, local paths and Hub ids."""
