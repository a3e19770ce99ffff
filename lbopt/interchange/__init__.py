"""Networks as files: safetensors under lbopt's names, or folders of `transformers`."""
