"""One file per command: flags -> call -> render."""
