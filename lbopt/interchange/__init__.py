"""Networks as files that other programs read: safetensors under our names, or folders as `transformers` keeps them."""
