"""A model of text behind HTTP: the requests of OpenAI's API, and a page to try it."""
