"""Between this project's parameter names and safetensors files as Hugging Face has them."""
