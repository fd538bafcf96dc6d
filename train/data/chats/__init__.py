"""Conversations, rendered as text by a chat template, with a loss on the answers of assistants."""
