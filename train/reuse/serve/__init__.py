"""HTTP server of a language model: requests of OpenAI's API, and a web page."""
