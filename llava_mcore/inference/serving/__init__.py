"""A server for an exported model, with OpenAI's interface, and a page in front of it."""
