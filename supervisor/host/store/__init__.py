"""Files: the state, responses, pictures and bodies that llmux keeps, and files that processes share."""
