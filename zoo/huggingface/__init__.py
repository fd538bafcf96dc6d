"""Configs, parameter names and safetensors files of Hugging Face's `transformers`, both ways."""
