"""What differs between versions of the packages below us: a file a package, each with the versions it is for."""
