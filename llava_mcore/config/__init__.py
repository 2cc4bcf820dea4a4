"""What a run is: the schema, how it is read, and the rules that hold between its sections. Imports no torch."""
