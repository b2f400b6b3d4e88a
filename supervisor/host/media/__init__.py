"""Media of prompts: fetched from checked addresses, opened in a process of its own."""
