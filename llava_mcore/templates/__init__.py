"""Chat templates by name, each a Jinja file beside this one; build and data both take them from here."""
