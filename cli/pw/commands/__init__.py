"""One file per noun. A command parses its flags, calls one function and prints what came back."""
