"""A conversation's text: which template renders it, and which tokens its characters become."""
