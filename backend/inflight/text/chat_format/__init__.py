"""A checkpoint's format of chats: its templates, and the tokens that end a turn."""
