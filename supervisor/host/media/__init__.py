"""Media of prompts: fetched from checked addresses, opened in a separate process."""
