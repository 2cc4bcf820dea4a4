"""What differs between versions of the packages below us: a file a package, each mend with the versions it is for."""
