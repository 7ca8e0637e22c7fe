"""A folder of safetensors: headers, the streaming reader and writer, the manifest, a path or a hub id."""
