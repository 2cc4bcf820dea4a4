"""The flags of the commands. Nothing heavy is imported: --help and a mistyped flag need not wait for torch."""
