"""Models of a configuration: their files, names, changes to requests, and whether they fit."""
