"""Conversations: rendered by a chat template, with a loss on what assistants say."""
