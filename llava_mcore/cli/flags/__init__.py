"""The flags of the commands. Light imports only, so that --help and errors in flags do not wait for torch."""
